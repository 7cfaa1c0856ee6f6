"""The yardstick of a series: what rounding does never gets less from one step to the next."""

from __future__ import annotations

import math

import pytest
import torch

from weft.verify.checks import check_scalars, check_tensors
from weft.verify.tolerances import RoundingAllowance, envelope, first_norm_bound, flipped_terms, rounded_terms


def test_where_curves_cross_the_earlier_distance_counts() -> None:
    distances = envelope([2.0, 4.0, 2.0], [2.002, 4.0, 2.0])
    assert distances == pytest.approx([0.002, 0.004, 0.002], rel=1e-3)


def test_an_overflow_does_not_widen_what_follows() -> None:
    distances = envelope([1.0, 1.0, 1.0], [1.0, math.inf, 1.0])
    assert distances[2] == 0.0


def test_a_chance_meeting_raises_no_alarm_and_a_real_error_does() -> None:
    truth, same = [2.0, 2.0, 2.0], [2.0, 2.0002, 2.0]
    assert check_scalars("norm", truth, same, [2.0, 2.0002, 2.0005], rule=2).ok
    assert not check_scalars("norm", truth, same, [2.0, 2.0002, 2.01], rule=2).ok
    assert not check_scalars("norm", truth, same, [2.0005, 2.0, 2.0], rule=2).ok  # nothing was measured before


def test_ranks_that_round_the_terms_of_a_sum_part_at_once_and_further_after_an_update() -> None:
    allowance = rounded_terms("bfloat16", along=0.5)
    assert envelope([1.0, 1.0], [1.0, 1.0], least=allowance.losses) == [2.0**-16, 2.0**-13]
    assert envelope([1.0, 1.0], [1.0, 1.0], least=allowance.norms) == [2.0**-13, 2.0**-9]
    assert flipped_terms("bfloat16").norms == (2.0**-16, 2.0**-9), "a fused loss rounds as its reference does"
    assert not RoundingAllowance().is_at_once
    assert envelope([1.0], [1.0], least=RoundingAllowance().losses) == [0.0]


def test_a_flipped_weight_is_noise_only_where_terms_are_rounded() -> None:
    zeros, moved = {"a": torch.zeros(256)}, {"a": torch.full((256,), 0.01)}
    flipped = {"a": moved["a"].clone()}
    flipped["a"][3] *= -1
    given = {"rule": 2, "dtype": "float32", "initial": zeros}
    assert not check_tensors("first update", moved, moved, flipped, **given)[0].ok  # type: ignore[arg-type]
    share = rounded_terms("float16", along=0.5).update
    assert check_tensors("first update", moved, moved, flipped, noise_share=share, **given)[0].ok  # type: ignore[arg-type]
    assert not check_tensors("first update", moved, moved, zeros, noise_share=share, **given)[0].ok  # type: ignore[arg-type]


def test_an_error_along_the_gradient_is_a_wrong_scale_and_one_across_it_is_rounding() -> None:
    """Both 0.4% of the gradient: the first one lengthens it by as much, the second one by nothing to speak of."""
    allowance = rounded_terms("bfloat16", along=0.5)

    def share(*, gap: float, along: float) -> float:
        bound = first_norm_bound(size=1.0, gap=gap, along=along, allowance=allowance, roundoff=2.0**-9)
        return bound.share(abs(along))

    assert share(gap=0.004, along=0.004) > 10
    assert share(gap=0.004, along=0.0005) < 0.3
    assert share(gap=0.0, along=0.0) == 0
