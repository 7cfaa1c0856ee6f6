"""The learning rate is a pure function of the step."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.parameter_groups import GroupSpec
from weft.core.run_spec import TrainSpec
from weft.report.rates import ROWS, draw_rates
from weft.train.rate import groups_in_words, learning_rate_at
from weft.verify.oracle.schedule import rate_of

Schedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]


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
        ("wsd", 10, 1.0),
        ("wsd", 80, 1.0),  # a decay share of 0.2
        ("wsd", 90, 0.55),
        ("wsd", 100, 0.1),
        ("inverse_sqrt", 5, 0.5),
        ("inverse_sqrt", 40, 0.5),
        ("inverse_sqrt", 90, 1 / 3),
    ],
)
def test_known_points(schedule: Schedule, step: int, expected: float) -> None:
    assert learning_rate_at(spec(schedule), step) == pytest.approx(expected)


def test_without_warm_up_and_with_nothing_but_warm_up() -> None:
    assert learning_rate_at(spec("constant", warmup=0), 1) == 1.0
    assert learning_rate_at(spec(steps=5, warmup=50), 5) == 1.0
    assert learning_rate_at(spec(steps=5, warmup=50), 1) == pytest.approx(0.2)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd", "inverse_sqrt"]),
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
    decays = schedule in ("cosine", "linear") or (schedule == "wsd" and round(0.2 * steps) > 0)
    if steps > warmup and decays:
        assert rates[-1] == pytest.approx(final)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd", "inverse_sqrt"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    final=st.floats(0, 1),
    share=st.floats(0, 1),
)
def test_the_oracle_has_the_same_formula(
    schedule: Schedule, steps: int, warmup: int, final: float, share: float
) -> None:
    train = spec(schedule, steps=steps, warmup=warmup, final=final).model_copy(update={"decay_share": share})
    tables = train.model_dump(mode="json")
    for step in range(1, steps + 1):
        assert learning_rate_at(train, step) == pytest.approx(rate_of(tables, step), abs=1e-9)


def test_the_picture_has_the_height_of_the_rates() -> None:
    rates = [learning_rate_at(spec("wsd", steps=640, warmup=64, final=0.0), step) for step in range(1, 641)]
    lines = draw_rates(rates, title="wsd").splitlines()
    assert len(lines) == ROWS + 2
    top, bottom = lines[1][10:], lines[ROWS][10:]
    assert top[32] == bottom[32] == "█"  # stable in the middle
    assert top[2] == " "
    assert bottom[2] == "█"
    assert top[-1] == " "
    assert bottom[-1] != "█"


def test_groups_in_words() -> None:
    groups = [GroupSpec(pattern="*norm*", learning_rate_ratio=0.5, weight_decay=0.0)]
    found = groups_in_words(spec().model_copy(update={"groups": groups}))
    assert found["*norm*"] == (0.5, "0")
    assert found["all others"][0] == 1.0
