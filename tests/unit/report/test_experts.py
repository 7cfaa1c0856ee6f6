"""The heat map of experts: values, limits, and a page without experts."""

from __future__ import annotations

import json

from weft.core.records import ExpertLoads, StepRecord
from weft.report.training.experts import MAX_COLUMNS, MAX_ROWS, draw_drops, draw_heat_map, draw_load


def test_loads_survive_their_line() -> None:
    loads = ExpertLoads.of(3, {"a": [0, 1, 3], "b": [2, 2]})
    assert ExpertLoads.from_dict(loads.as_dict()) == loads
    assert loads.by_layer() == {"a": [0.0, 0.75, 2.25], "b": [1.0, 1.0]}
    assert "dropped" not in loads.as_dict()


def test_drops_survive_their_line_and_are_drawn() -> None:
    loads = ExpertLoads.of(2, {"a": [0, 1, 3], "b": [2, 2]}, dropped=[1000, 234])
    assert ExpertLoads.from_dict(json.loads(json.dumps(loads.as_dict()))) == loads
    steps = [
        StepRecord(step=step, loss=1.0, grad_norm=1.0, tokens=1, learning_rate=0.1, dropped_share=share)
        for step, share in ((1, 0.25), (2, 0.125))
    ]
    chart = draw_drops(steps, [loads])
    assert chart is not None
    assert "25.00% at first, 12.50% at the end" in chart.caption
    assert "dropped 1,234 choices in 2 layers" in chart.caption


def test_rows_are_experts_and_columns_steps() -> None:
    chart = draw_heat_map([ExpertLoads.of(step, {"layers.0": [step, 1.0]}) for step in (1, 3)])
    assert chart is not None
    (drawn,) = chart.as_json()["data"]
    assert [list(row) for row in drawn["z"]] == [[1.0, 1.5], [1.0, 0.5]]
    assert list(drawn["x"]) == ["1", "3"]


def test_a_large_model_is_drawn_by_its_worst_layers() -> None:
    layers: dict[str, list[float]] = {f"layers.{n}": [1.0] * 128 for n in range(48)}
    layers["layers.7"] = [64.0] + [1.0] * 127
    chart = draw_heat_map([ExpertLoads.of(step, layers) for step in range(1, 3 * MAX_COLUMNS)])
    assert chart is not None
    (drawn,) = chart.as_json()["data"]
    assert len(drawn["z"]) <= MAX_ROWS
    assert len(drawn["x"]) == MAX_COLUMNS
    assert any("layer 7 " in row[0] for row in drawn["customdata"])
    assert "layers are left out" in chart.caption


def test_a_dense_model_has_no_chart() -> None:
    step = StepRecord(step=1, loss=1.0, grad_norm=1.0, tokens=1, learning_rate=0.1)
    assert draw_heat_map([]) is None
    assert draw_load([step]) is None
    assert draw_drops([step], []) is None
