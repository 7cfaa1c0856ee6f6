"""Attention work of each context-parallel rank: pairs of a query and a key that causal masks and windows allow.

Whole rows; documents need fewer. Shown for both splits, so that the choice is seen.
"""

from __future__ import annotations

from typing import get_args

from weft.core.model_shape import ModelShape
from weft.core.plan import Plan
from weft.core.sequence_split import SequenceSplit, work_over_mean

SPLITS: tuple[SequenceSplit, ...] = get_args(SequenceSplit)


def work_by_split(plan: Plan, shape: ModelShape, length: int) -> dict[str, list[float]]:
    """Each rank's pairs over their mean, of all blocks; {} where every rank has whole rows.

    `ulysses` gives every rank all positions of a share of the heads: its work is equal whatever the split.
    """
    degree, policy = plan.mesh.cp, plan.context_parallel
    if degree == 1 or policy.attention == "ulysses":
        return {}
    found = [shape.kinds[kind].attention for kind in shape.order]
    windows = [attention.window for attention in found if attention is not None]
    if not windows:
        return {}
    group = policy.head_ranks(degree)
    return {split: work_over_mean(length, degree=degree, split=split, group=group, windows=windows) for split in SPLITS}
