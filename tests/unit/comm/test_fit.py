"""Latency and bandwidth are found again from made timings, with noise and with outliers."""

from __future__ import annotations

import random

import pytest

from weft.comm.fit import Timing, fit_link

ALPHA, BETA = 3e-5, 2e-9


def timings(*, noise: float = 0.0, outliers: int = 0) -> list[Timing]:
    draw = random.Random(0)
    found = []
    for steps in (2, 6):
        for exponent in range(10, 27):
            exact = steps * ALPHA + 2**exponent * BETA
            found.append(Timing(steps=steps, nbytes=2**exponent, seconds=exact * (1 + noise * draw.uniform(-1, 1))))
    for index in range(outliers):
        slow = found[5 * index]
        found[5 * index] = Timing(steps=slow.steps, nbytes=slow.nbytes, seconds=8 * slow.seconds)
    return found


@pytest.mark.parametrize(
    ("noise", "outliers", "within"), [(0.0, 0, 1e-6), (0.05, 0, 0.05), (0.05, 5, 0.1)], ids=["exact", "noisy", "hit"]
)
def test_the_line_is_found(noise: float, outliers: int, within: float) -> None:
    found = fit_link(timings(noise=noise, outliers=outliers))
    assert found is not None
    assert found.alpha_s == pytest.approx(ALPHA, rel=within)
    assert found.beta_s_per_byte == pytest.approx(BETA, rel=within)
    assert found.seconds(steps=2, nbytes=100) == pytest.approx(2 * ALPHA, rel=within + 0.01)


def test_no_figure_is_negative() -> None:
    """Small messages that take less than their share of the line would ask for a negative latency."""
    found = fit_link(
        [Timing(steps=1, nbytes=10.0**k, seconds=BETA * 10.0**k * (0.5 if k < 5 else 1)) for k in range(3, 9)]
    )
    assert found is not None
    assert found.alpha_s == 0
    assert found.beta_s_per_byte == pytest.approx(BETA, rel=0.6)


def test_one_size_cannot_tell_latency_from_bandwidth() -> None:
    assert fit_link([Timing(steps=1, nbytes=100, seconds=1.0)] * 5) is None
    assert fit_link([]) is None
