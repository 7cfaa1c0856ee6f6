"""Rows in float8: values, bytes, and what is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.experts import float8_bytes
from weft.engine.ep.wire import packed, unpacked
from weft.verify.float8_reference import arrived

HALF_STEP = 2.0**-4  # of e4m3: three bits of a fraction
LEAST = 2.0**-10  # half of its smallest number, at scale 1


def sent(rows: torch.Tensor) -> torch.Tensor:
    return unpacked(packed(rows, "float8"), "float8", rows.shape[1], rows.dtype)


@settings(max_examples=80, deadline=None)
@given(
    width=st.integers(1, 400),
    count=st.integers(0, 5),
    power=st.integers(-140, 120),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_values_are_the_nearest_at_the_scale_of_their_block(
    width: int, count: int, power: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(count, width, generator=generator, dtype=torch.float64) * 2.0**power).to(dtype)
    rows[rows.abs() > 1e38] = 0
    found = sent(rows)
    assert (found.shape, found.dtype) == (rows.shape, dtype)
    assert torch.equal(found, arrived(rows)), "another rule than the reference's"
    assert torch.equal(sent(found), found), "numbers of float8 change"
    for begin in range(0, width, 128):
        block, made = rows[:, begin : begin + 128].double(), found[:, begin : begin + 128].double()
        # at most twice the least scale at which the largest number fits; float32 has no smaller one than 2**-126
        scale = (block.abs().amax(1, keepdim=True) / 448 * 2).clamp(min=2.0**-126)
        assert bool(((made - block).abs() <= torch.maximum(block.abs() * HALF_STEP, scale * LEAST)).all())


def test_a_row_has_the_bytes_of_the_formula() -> None:
    for width, nbytes in ((2048, 2112), (7168, 7392), (130, 264), (1, 132)):
        assert float8_bytes(width) == nbytes
        assert packed(torch.ones(3, width), "float8").nbytes == 3 * nbytes


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_arrives_as_nan(bad: float) -> None:
    rows = torch.ones(2, 256)
    rows[0, 130] = bad
    found = sent(rows)
    assert found[0, 128:].isnan().all()
    assert torch.equal(found[0, :128], rows[0, :128])
    assert torch.equal(found[1], rows[1])


def test_rows_that_are_not_packed_are_the_same_tensor() -> None:
    rows = torch.randn(2, 5)
    assert unpacked(packed(rows, "activations"), "activations", 5, rows.dtype) is rows
