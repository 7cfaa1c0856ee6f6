"""The learning rate is a pure function of the step."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.run_spec import TrainSpec
from weft.train.rate import learning_rate_at

Schedule = Literal["cosine", "linear", "constant"]


def spec(schedule: Schedule = "cosine", *, steps: int = 100, warmup: int = 10, final: float = 0.1) -> TrainSpec:
    return TrainSpec(
        steps=steps, learning_rate=1.0, schedule=schedule, warmup_steps=warmup, final_learning_rate_ratio=final
    )


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 1, 0.1),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.55),  # half-way down, between 1 and 0.1
        ("cosine", 100, 0.1),
        ("linear", 55, 0.55),
        ("linear", 100, 0.1),
        ("linear", 200, 0.1),  # a longer resume stays at the end
        ("constant", 5, 0.5),
        ("constant", 11, 1.0),
        ("constant", 100, 1.0),
    ],
)
def test_known_points(schedule: Schedule, step: int, expected: float) -> None:
    assert learning_rate_at(spec(schedule), step) == pytest.approx(expected)


def test_without_warm_up_and_with_nothing_but_warm_up() -> None:
    assert learning_rate_at(spec("constant", warmup=0), 1) == 1.0
    assert learning_rate_at(spec(steps=5, warmup=50), 5) == 1.0
    assert learning_rate_at(spec(steps=5, warmup=50), 1) == pytest.approx(0.2)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    steps=st.integers(1, 500),
    warmup=st.integers(0, 600),
    final=st.floats(0, 1),
)
def test_it_rises_then_falls_and_stays_in_bounds(schedule: Schedule, steps: int, warmup: int, final: float) -> None:
    train = spec(schedule, steps=steps, warmup=warmup, final=final)
    rates = [learning_rate_at(train, step) for step in range(1, steps + 1)]
    peak = min(warmup, steps)
    assert all(0 < rate <= 1.0 + 1e-12 or final == 0 for rate in rates)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[max(peak - 1, 0) :] == sorted(rates[max(peak - 1, 0) :], reverse=True)
    if steps > warmup and schedule != "constant":
        assert rates[-1] == pytest.approx(final)
