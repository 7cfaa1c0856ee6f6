"""Families that were wrong once, each for a reason of its own: two ranks against one process."""

from __future__ import annotations

import pytest
from benchmark_folder import benchmarks_importable
from samples import by_default

with benchmarks_importable():
    import tensor_families

# CTRL gives its attention the same hidden states three times; XGLM drops out weights of [rows x heads, …]; experts of
# LongCat-Flash stay whole, so that with sequence parallel ranks use different ones
FAMILIES = by_default([], ["ctrl", "xglm", "longcat_flash"])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_ranks_are_one_process(model_type: str) -> None:
    with benchmarks_importable():  # by the ranks too
        row = tensor_families.judge(model_type, degree=2, unvouched=False)
    assert (row["verdict"], row["why"]) == ("right", "")
