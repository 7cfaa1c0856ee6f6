"""Division of a global batch into rows per data-parallel rank and micro-batch, checked before anything starts."""

from __future__ import annotations

from weft.core.errors import BatchError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.tensor_grid import row_chunks


def require_divisible(run: RunSpec, plan: Plan) -> None:
    """Require that the batch divides over data-parallel ranks, micro-batches and a grid's rows, a sequence over tp."""
    global_batch, chunks = run.train.global_batch, row_chunks(plan.tensor_parallel.mode, plan.mesh.tp)
    divisor = plan.mesh.dp_degree * plan.pipeline.microbatches * chunks
    if global_batch % divisor:
        below, above = global_batch // divisor * divisor, -(-global_batch // divisor) * divisor
        in_grid = f" x {chunks} rows of the {plan.tensor_parallel.mode} grid" if chunks > 1 else ""
        raise BatchError(
            f"a global batch of {global_batch} does not divide over {plan.mesh.dp_degree} data-parallel ranks"
            f" x {plan.pipeline.microbatches} micro-batches{in_grid}",
            hint=f"set train.global_batch to {f'{below} or ' if below else ''}{above}, or change the plan",
        )
    _require_sequence(run.data.sequence_length, plan)


def _require_sequence(length: int, plan: Plan) -> None:
    tp, policy = plan.mesh.tp, plan.tensor_parallel
    if tp > 1 and policy.mode == "1d" and policy.sequence_parallel and length % tp:
        near = [value for value in (length // tp * tp, -(-length // tp) * tp) if value]
        raise BatchError(
            f"a sequence of {length} does not divide over {tp} tensor-parallel ranks",
            hint=f"set data.sequence_length to {' or '.join(map(str, near))},"
            " or tensor_parallel.sequence_parallel to false",
        )
