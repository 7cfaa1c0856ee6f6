"""How blocks are dealt to pipeline stages: the one rule that planner and engine share.

Stages differ by at most one block. The first and the last stage, which also hold embedding and head, are the first to
get the smaller share, so 126 blocks on 16 stages give 7 and 7 at the ends and 8 between.
"""

from __future__ import annotations


def split_blocks(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks a stage, first stage first."""
    fewer, missing = divmod(num_blocks, num_stages)
    sizes = [fewer + 1] * num_stages if missing else [fewer] * num_stages
    if missing:
        for stage in _shortest_first(num_stages)[: num_stages - missing]:
            sizes[stage] -= 1
    return tuple(sizes)


def _shortest_first(num_stages: int) -> list[int]:
    """Stages in the order in which they are spared a block: last, first, then inwards from the back."""
    return [num_stages - 1, *([0] if num_stages > 1 else []), *range(num_stages - 2, 0, -1)]
