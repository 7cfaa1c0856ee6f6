"""How a global batch is cut: rows a data-parallel rank, rows a micro-batch. Arithmetic, checked before any start."""

from __future__ import annotations

from weft.core.errors import BatchError
from weft.core.plan import Plan


def require_divisible(global_batch: int, plan: Plan) -> None:
    """The global batch must cut evenly over data-parallel ranks and micro-batches."""
    pieces = plan.mesh.dp_degree * plan.pipeline.microbatches
    if global_batch % pieces:
        below, above = global_batch // pieces * pieces, -(-global_batch // pieces) * pieces
        raise BatchError(
            f"a global batch of {global_batch} does not divide over {plan.mesh.dp_degree} data-parallel ranks"
            f" x {plan.pipeline.microbatches} micro-batches",
            hint=f"set train.global_batch to {f'{below} or ' if below else ''}{above}, or change the plan",
        )
