"""Gradients that travel as codes, on four ranks: near the run in float32, a quarter of its bytes, no other traffic."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny import build_engine, global_batch, train_steps

from weft.engine.measure.meter import StepMeter

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 4}},
    "ZeRO-3": {"mesh": {"dp_shard": 4}, "pipeline": {"microbatches": 2}},
    "HSDP": {"mesh": {"dp_shard": 2, "dp_replicate": 2}, "data_parallel": {"zero": 1}},
}


def trained(rank: int, world: int, layouts: dict[str, dict[str, Any]], formats: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        for reduce in formats:
            engine = build_engine("llama", {**layout, "precision": {"reduce": reduce}})
            values = train_steps(engine, 2)
            meter = StepMeter(engine)
            with meter.measuring():
                meter.next_step()
                engine.step(engine.share_of(global_batch(2)))
            sent = sum(row["bytes"] for row in meter.traffic if row["phase"] == "backward" and _carries(row, name))
            wrong = [f"{row.component} {row.found}" for row in engine.dtypes() if not row.ok]
            found[f"{name} {reduce}"] = (values, sent, wrong)
            engine.close()
    return found


def _carries(row: dict[str, Any], layout: str) -> bool:
    """Whether the row is of gradients: shards of ZeRO-3 are gathered in the backward too."""
    return row["collective"] != "all_gather" or row["axis"] == "dp_replicate"


def gathered(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, precision in {"bf16": {}, "int8": {"gather": "int8"}, "float8": {"gather": "float8_e4m3"}}.items():
        engine = build_engine("llama", {"mesh": {"dp_shard": 2}, "precision": {"preset": "bf16", **precision}})
        values = train_steps(engine, 2)
        meter = StepMeter(engine)
        with meter.measuring():
            meter.next_step()
            engine.step(engine.share_of(global_batch(2)))
        sent = sum(row["bytes"] for row in meter.traffic if row["collective"] == "all_gather")
        wrong = [f"{row.component} {row.found}" for row in engine.dtypes() if not row.ok]
        found[name] = (values, sent, wrong)
        engine.close()
    return found


def test_weights_travel_as_codes() -> None:
    ranks = run_ranks(gathered, 2, timeout_s=240.0)
    plain, plain_sent, _ = ranks[0]["bf16"]
    for name in ("int8", "float8"):
        values, sent, wrong = ranks[0][name]
        assert not wrong
        assert ranks[1][name][0] == values
        assert sent / plain_sent == pytest.approx(0.508, abs=0.005), "of bfloat16"
        assert values != plain
        assert all(abs(one[0] / other[0] - 1) < 2e-3 for one, other in zip(values, plain, strict=True))


def test_codes_are_near_float32_in_a_quarter_of_the_bytes() -> None:
    ranks = run_ranks(trained, 4, LAYOUTS, ["float32", "int8"], timeout_s=240.0)
    for name in LAYOUTS:
        values, sent, wrong = ranks[0][f"{name} int8"]
        wide, wide_sent, _ = ranks[0][f"{name} float32"]
        assert not wrong
        assert all(one[f"{name} int8"][0] == values for one in ranks), "the same on every rank"
        assert 0.253 < sent / wide_sent < 0.26
        assert values != wide
        for (loss, norm), (other_loss, other_norm) in zip(values, wide, strict=True):
            assert abs(loss / other_loss - 1) < 1e-4
            assert abs(norm / other_norm - 1) < 5e-3
