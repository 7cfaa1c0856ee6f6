"""Recompute by budget: the rule that selects the blocks to recompute, shared by planner and engine.

A mixture is (full, selective): the numbers of blocks that are recomputed fully and selectively; the rest save all
activations. Of L blocks with n = full + selective, the first i contain

    recomputed   ceil(i n / L)        of these, fully   ceil(recomputed full / n)

so every span of blocks, and with it every pipeline stage, has its share up to one or two blocks. The first block is
recomputed before any other, and the last one only if all are: its backward runs first, when all other activations are
still saved, and would immediately recreate its own.

Of K blocks that are not recomputed, N have their saved tensors on the host: ceil(x N / K) of the first x. They are
spread over the depth, so that a copy has the time of several blocks, and the last one comes last here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

BlockPolicy = Literal["none", "full", "selective"]


def counts_before(block: Any, *, num_blocks: int, full: Any, selective: Any) -> tuple[Any, Any]:
    """(fully, selectively) recomputed among the first `block` blocks. Integers, or numpy columns of them."""
    both = full + selective
    again = -(-block * both // num_blocks)
    fully = -(-again * full // (both + (both == 0)))  # avoids a division by zero
    return fully, again - fully


def block_policies(policy: str, mixture: tuple[int, int] | None, *, num_blocks: int) -> tuple[BlockPolicy, ...]:
    """The policy of each block in order, from `activations.policy` and `activations.mixture`."""
    if policy != "budget":
        return (policy,) * num_blocks  # type: ignore[return-value]
    full, selective = mixture or (0, 0)
    ends = [
        counts_before(block, num_blocks=max(num_blocks, 1), full=full, selective=selective)
        for block in range(num_blocks + 1)
    ]
    found: list[BlockPolicy] = []
    for (fully, partly), (fully_after, partly_after) in pairwise(ends):
        found.append("full" if fully_after > fully else "selective" if partly_after > partly else "none")
    return tuple(found)


def offloaded_blocks(policies: Sequence[BlockPolicy], number: int) -> list[int]:
    """Indices of the `number` blocks whose saved tensors leave the device, from the policies of all blocks."""
    kept = [index for index, policy in enumerate(policies) if policy == "none"]
    counts = [offloaded_before(place, num_kept=len(kept), number=number) for place in range(len(kept) + 1)]
    return [index for index, (before, after) in zip(kept, pairwise(counts), strict=True) if after > before]


def offloaded_before(place: Any, *, num_kept: Any, number: Any) -> Any:
    """How many of the first `place` blocks that are not recomputed leave. Integers, or numpy columns of them."""
    return -(-place * number // (num_kept + (num_kept == 0)))
