"""Positions of neighbours that exchange heads: together those of one rank of fewer, in the order of the row."""

from __future__ import annotations

import pytest
import torch

from weft.core.sequence_split import SequenceSplit
from weft.engine.cp.positions import Positions

LENGTH = 48


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("degree", "size"), [(4, 2), (8, 2), (8, 4), (6, 3), (4, 4), (4, 1)])
def test_a_group_has_the_positions_of_one_rank_of_fewer(degree: int, size: int, split: SequenceSplit) -> None:
    row = torch.arange(LENGTH)
    ranks = [Positions(length=LENGTH, degree=degree, rank=rank, split=split) for rank in range(degree)]
    for first in range(0, degree, size):
        group = ranks[first : first + size]
        together = group[0].of_groups(size)
        for rank in group:
            assert rank.of_groups(size) == together
            assert rank.in_group(size).in_order([each.take(row, 0) for each in group], 0).tolist() == (
                together.take(row, 0).tolist()
            )
            assert rank.in_group(size).take(together.take(row, 0), 0).tolist() == rank.take(row, 0).tolist()
