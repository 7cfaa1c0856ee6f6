"""Short chunks for losses that loop over tokens: the few tokens of a verification would all fit into one chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.core.plan import Plan
from weft.engine.kernels import cross_entropy, head_loss
from weft.engine.tp import cross_entropy as tp_cross_entropy

CHUNK_TOKENS = 5  # divides no power of two: the last chunk is shorter


def has_chunked_loss(plan: Plan) -> bool:
    """Whether the plan's loss loops over chunks of tokens: fused with its head, or over a sharded vocabulary."""
    return plan.kernels.loss == "fused" or (plan.mesh.tp > 1 and plan.tensor_parallel.loss_parallel)


@contextmanager
def short_chunks(vocab_size: int) -> Iterator[None]:
    """Inside, losses take CHUNK_TOKENS tokens per chunk, on every rank."""
    sizes = (
        (head_loss, "CHUNK_ELEMENTS", 1),
        (head_loss, "_ROWS", CHUNK_TOKENS),
        (cross_entropy, "PIECE_ELEMENTS", 2 * vocab_size),
        (tp_cross_entropy, "CHUNK_ELEMENTS", 2 * vocab_size),
    )
    before = [getattr(module, name) for module, name, _ in sizes]
    for module, name, value in sizes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(sizes, before, strict=True):
            setattr(module, name, value)
