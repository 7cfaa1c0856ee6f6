"""The planner's contract of an axis: one that only replicates adds neither a rule nor traffic; others are asked."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import request_of, view_with

import weft.plan.traffic
from weft.core import axes
from weft.plan.axes import AXES
from weft.plan.axis import PlanAxis, TrafficRow
from weft.plan.rules import RULES
from weft.plan.traffic import estimate_traffic


def test_an_axis_that_only_replicates_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_with(request_of(), 0, dp_shard=4, tp=2, zero=3)
    before = estimate_traffic(view)
    monkeypatch.setattr(weft.plan.traffic, "AXES", (*AXES, PlanAxis(name="toy")))
    after = estimate_traffic(view)
    assert [(row.axis, row.collective, row.phase) for row in before.rows] == [
        (row.axis, row.collective, row.phase) for row in after.rows
    ]
    assert PlanAxis(name="toy").rules == ()


def test_traffic_of_an_axis_is_listed_and_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TrafficRow("toy", "all_to_all", "forward", np.array([7.0]), np.array([1.0]))
    toy = PlanAxis(name="toy", traffic=lambda view: [row, row])
    monkeypatch.setattr(weft.plan.traffic, "AXES", (*AXES, toy))
    found = estimate_traffic(view_with(request_of(), 0, dp_shard=8, zero=3)).of("toy")
    assert [float(value[0]) for value in found] == [14.0, 2.0]


def test_every_axis_of_the_mesh_has_its_part_and_its_rules_are_asked() -> None:
    named = {axis.name for axis in AXES}
    assert {axes.TP, axes.CP, axes.EP, axes.PP} <= named
    assert {axis.removesuffix("_replicate").removesuffix("_shard") for axis in axes.MESH_ORDER} <= named
    assert {rule.name for axis in AXES for rule in axis.rules} < {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)
