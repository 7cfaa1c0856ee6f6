"""Families that were wrong once, each for a reason of its own: two ranks against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

import tensor_families

# CTRL gives its attention the same hidden states three times; XGLM drops out weights of [rows x heads, …]; experts of
# LongCat-Flash stay whole, so that with sequence parallel ranks use different ones
FAMILIES = ("ctrl", "xglm", pytest.param("longcat_flash", marks=pytest.mark.slow))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_ranks_are_one_process(model_type: str) -> None:
    row = tensor_families.judge(model_type, degree=2, unvouched=False)
    assert (row["verdict"], row["why"]) == ("right", "")
