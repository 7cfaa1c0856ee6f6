"""The cached figures are the closed forms' where those exist, and the simulation's elsewhere."""

from __future__ import annotations

import pytest
from asked import Asked, requests
from hypothesis import given, settings

from weft.schedule import StageCosts, formulas, generate, simulate, summary


@settings(max_examples=60)
@given(requests())
def test_the_summary_is_of_the_long_run(asked: Asked) -> None:
    name, p, m, v = asked
    figures = summary(name, p, m, v)
    share = formulas.bubble_share(name, **asked.counts)
    assert figures.bubble_share == pytest.approx(share, abs=1e-12)
    assert figures.idle_over_ideal == pytest.approx(share / (1 - share), abs=1e-12)
    assert figures.step_s == pytest.approx(3 * m * v / (1 - share))
    assert figures.weight_versions == tuple(formulas.weight_versions(name, stage=s, num_ranks=p) for s in range(p * v))


def test_unequal_costs_and_slow_links_are_simulated() -> None:
    figures = summary("zbv", 4, 8, 2, forward_s=2, backward_input_s=3, backward_weight_s=1, send_s=0.5)
    schedule = generate("zbv", num_ranks=4, num_microbatches=8, virtual_stages=2)
    costs = StageCosts.uniform(8, forward_s=2, backward_input_s=3, backward_weight_s=1, send_s=0.5)
    assert figures.bubble_share == simulate(schedule, costs).bubble_share
    assert figures.bubble_share > summary("zbv", 4, 8, 2).bubble_share


def test_zbv_never_waits_inside_its_span() -> None:
    assert summary("zbv", 6, 20, 2).span_bubble_share == 0


def test_the_second_call_is_the_first_one_s() -> None:
    assert summary("1f1b", 4, 8) is summary("1f1b", 4, 8)
