"""Recompute by budget, block by block: the one rule for which blocks are computed again, and how.

A mixture is (full, selective): so many blocks are computed again fully, so many selectively; the rest keep everything.
Of L blocks with n = full + selective, the first i hold

    computed again   ceil(i n / L)        of these, fully   ceil(again full / n)

so every stretch of blocks, and with it every pipeline stage, has its share but for one or two blocks. The first block
is computed again before any other and the last one only where all are: its backward comes first, when everything else
is still kept, and would bring back at once what was not kept of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

BlockPolicy = Literal["none", "full", "selective"]


def counts_before(block: Any, *, num_blocks: int, full: Any, selective: Any) -> tuple[Any, Any]:
    """(fully, selectively) computed again among the first `block` blocks. Whole numbers, or numpy columns of them."""
    both = full + selective
    again = -(-block * both // num_blocks)
    fully = -(-again * full // (both + (both == 0)))  # of none: nothing, not a division by zero
    return fully, again - fully


def block_policies(policy: str, mixture: tuple[int, int] | None, *, num_blocks: int) -> tuple[BlockPolicy, ...]:
    """What becomes of each block, first block first, under `activations.policy` and `activations.mixture`."""
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
