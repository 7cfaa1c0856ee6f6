"""A loss taken in many stretches of tokens, as at real sizes: the few tokens of a verification would all be in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.core.plan import Plan
from weft.engine.kernels import cross_entropy, head_loss
from weft.engine.tp import cross_entropy as cut_cross_entropy

STRETCH_TOKENS = 5  # divides no power of two: the last stretch is shorter


def takes_stretches(plan: Plan) -> bool:
    """Whether the plan's loss loops over tokens: one that is fused with its head, or that of a cut vocabulary."""
    return plan.kernels.loss == "fused" or (plan.mesh.tp > 1 and plan.tensor_parallel.loss_parallel)


@contextmanager
def short_stretches(vocab_size: int) -> Iterator[None]:
    """Inside, losses take STRETCH_TOKENS at a time, on every rank alike."""
    sizes = (
        (head_loss, "CHUNK_ELEMENTS", 1),
        (head_loss, "_ROWS", STRETCH_TOKENS),
        (cross_entropy, "PIECE_ELEMENTS", 2 * vocab_size),
        (cut_cross_entropy, "CHUNK_ELEMENTS", 2 * vocab_size),
    )
    before = [getattr(module, name) for module, name, _ in sizes]
    for module, name, value in sizes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(sizes, before, strict=True):
            setattr(module, name, value)
