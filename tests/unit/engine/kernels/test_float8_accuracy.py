"""Figures of float8 operands: against sums by hand, over chunks and recompute; layers with outliers fall back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import build_engine, global_batch
from torch import Tensor, nn

import weft.engine.kernels.float8_accuracy as accuracy
from weft.comm.groups import ensure_group
from weft.core.errors import NotBuiltError, PlanError
from weft.core.executable import require_executable
from weft.core.float8_section import RECIPES, Float8, Float8Recipe
from weft.core.plan import Plan
from weft.core.records import StepRecord
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.kernels.float8 import Float8Linear, scaled_product
from weft.engine.kernels.float8_accuracy import Float8Layers
from weft.engine.kernels.float8_scaling import Scaling
from weft.verify.float8_check import _planted
from weft.verify.float8_reference import Fallback, fallback_of, multiply_in_float8, rounded

WIDE = ModelSpec(
    type="llama",
    config={
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
)
SMALL = "qwen3-tied"
OUTLIERS, NORM = "model.layers.1.self_attn.q_proj", "model.layers.1.input_layernorm.weight"


def tables(recipe: str = "tensorwise", **more: Any) -> dict[str, Any]:
    return {"precision": {"preset": "bf16"}, "float8": {"linears": "all", "recipe": recipe, **more}}


@pytest.fixture(autouse=True)
def _group() -> None:
    ensure_group(device_type="cpu")


def measured_product(recipe: Float8Recipe, x: Tensor, w: Tensor, g: Tensor) -> dict[str, list[float]]:
    layers = Float8Layers(Float8(linears="all", recipe=recipe, measure_every=1), ["layer"], device=torch.device("cpu"))
    with layers.watching(0):
        rows, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        scaling = Scaling(recipe, accuracy=layers.accuracy_of("layer"))
        scaled_product(rows, weight, scaling).backward(g)  # type: ignore[no-untyped-call]
    found: dict[str, list[float]] = layers.figures["float8_layers"]["layer"]
    return found


def by_hand(values: Tensor, made: Tensor) -> list[float]:
    values, made = values.double(), made.double()
    some = values != 0
    error = float(((made - values)[some] / values[some]).abs().mean())
    return [error, 0.0, float((made[some] == 0).sum() / some.sum())]


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "nvfp4"])
def test_figures_are_those_of_all_rounded_values(recipe: Float8Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g = _planted("x", 160, 256), _planted("w", 128, 256), _planted("g", 160, 128)
    x[:, :7] = 0
    found = measured_product(recipe, x, w, g)
    operands = {"input": (x, {}), "weight": (w, {"is_weight": True}), "gradient": (g, {"is_gradient": True})}
    for name, (values, kind) in operands.items():
        ways = [values] if recipe == "tensorwise" else [values, values.t()]
        both = torch.cat([way.flatten() for way in ways])
        expected = by_hand(both, torch.cat([rounded(way, recipe, **kind).flatten() for way in ways]))
        assert found[name] == pytest.approx(expected, rel=1e-3, abs=1e-6), name
    assert found["input"][2] > 0
    monkeypatch.setattr(accuracy, "_CHUNK_ELEMENTS", 1000)
    assert measured_product(recipe, x, w, g) == found


def test_values_beyond_the_largest_code_overflow() -> None:
    """A block's scale in e4m3 may be too small for its largest value."""
    x = torch.full((16, 32), 0.1)
    x[:, 0], x[0, 0] = 6 * 17.0, 6 * 448.0  # 17 is rounded to 16
    found = measured_product("nvfp4", x, x.clone(), torch.ones(16, 16))
    beyond = 15  # of the first blocks, but for the row that sets the scale of the whole
    assert found["input"][1] == pytest.approx(beyond / (2 * x.numel()), rel=0.2)
    assert measured_product("rowwise", x, x.clone(), torch.ones(16, 16))["input"][1] == 0


def test_only_every_nth_step_is_measured_and_no_bit_changes() -> None:
    plain, engine = build_engine(SMALL, tables()), build_engine(SMALL, tables(measure_every=2))
    records = []
    for step in range(3):
        expected, found = plain.step(global_batch(step)), engine.step(global_batch(step))
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
        assert (found.float8_error is not None) == (step % 2 == 1)
        assert expected.float8_layers is None
        records.append(found)
    last = records[1]
    assert last.float8_layers is not None
    assert len(last.float8_layers) == 2 * 7
    assert all(set(row) == {"input", "weight", "gradient"} for row in last.float8_layers.values())
    assert StepRecord.from_dict(last.as_dict()) == last
    assert plain.float8.summary() is None


def test_recompute_counts_a_forward_once() -> None:
    records = []
    for policy in ("none", "full"):
        engine = build_engine(SMALL, {**tables("mxfp8", measure_every=1), "activations": {"policy": policy}})
        records.append(engine.step(global_batch(0)).float8_layers)
    assert records[0] == records[1]


def with_outliers(recipe: str = "tensorwise", **more: Any) -> Engine:
    engine = build_engine(WIDE, tables(recipe, measure_every=2, **more), frozen=[NORM])
    plant(engine.model)
    return engine


@torch.no_grad()
def plant(model: nn.Module) -> None:
    """An outlier so large that one scale for the matrix leaves nothing of the other weights, and a norm that gives it
    no input: the rest of the model is as it was."""
    model.get_parameter(f"{OUTLIERS}.weight")[3, 5] = 2e4
    model.get_parameter(NORM)[5] = 0


def test_a_layer_with_outliers_falls_back() -> None:
    engine = with_outliers(fallback_error=0.2)
    layer: Any = engine.model.get_submodule(OUTLIERS)
    calls: list[bool] = []
    layer.register_forward_hook(
        lambda module, args, out: calls.append(torch.equal(out, F.linear(args[0], module.weight)))
    )
    records = [engine.step(global_batch(step)) for step in range(4)]
    assert calls == [False, False, True, True]
    assert [record.float8_fallback for record in records] == [None, (OUTLIERS,), None, None]
    first, last = records[1].float8_layers, records[3].float8_layers
    assert first is not None
    assert last is not None
    assert first[OUTLIERS]["weight"][2] > 0.9, "most weights become 0"
    assert set(first) - set(last) == {OUTLIERS}
    assert engine.scalars()["float8"] == {OUTLIERS: 2}
    assert engine.float8.summary()["unquantised"] == [{"layer": OUTLIERS, "step": 2}]  # type: ignore[index]


def test_smaller_scales_keep_the_layer() -> None:
    engine = with_outliers("mxfp8", fallback_error=0.2)
    for step in range(2):
        record = engine.step(global_batch(step))
    assert record.float8_fallback is None


def test_a_resumed_run_continues_with_the_same_layers(tmp_path: Path) -> None:
    engine = with_outliers(fallback_error=0.2)
    for step in range(2):
        engine.step(global_batch(step))
    engine.save(tmp_path)
    expected = engine.step(global_batch(2))
    resumed = build_engine(WIDE, tables(measure_every=50, fallback_error=0.2), frozen=[NORM])
    resumed.load(tmp_path)
    assert resumed.step(global_batch(2)).loss == expected.loss
    assert resumed.float8.scalars() == {OUTLIERS: 2}
    without = build_engine(WIDE, tables(), frozen=[NORM])
    without.load(tmp_path)
    assert without.step(global_batch(2)).loss != expected.loss


def test_the_reference_decides_alike() -> None:
    """Its own arithmetic, over two micro-batches."""
    engine = with_outliers(fallback_error=0.2)
    model, fallback = build_engine(WIDE, {"precision": {"preset": "bf16"}}).model.bfloat16(), Fallback(2, 0.2)
    plant(model)
    model.float8_fallback = fallback
    multiply_in_float8(model, "all", "tensorwise", fallback)
    for step in range(2):
        engine.step(global_batch(step))
        for half in (slice(0, 8), slice(8, 16)):
            fallback_of(model).begin(step)
            batch = {key: value[half] for key, value in global_batch(step).items()}
            model(**batch).loss.backward()
    fallback.finish()
    assert fallback.plain == set(engine.float8.scalars()) == {OUTLIERS}


def test_experts_are_measured_and_fall_back() -> None:
    float8 = {"linears": "none", "experts": "all", "recipe": "mxfp8", "measure_every": 1}
    mixture = {"precision": {"preset": "bf16"}, "float8": float8}
    engine = build_engine("mixtral", {**mixture, "float8": {**float8, "fallback_error": 0.001}})
    plain = build_engine("mixtral", {"precision": {"preset": "bf16"}})
    record = engine.step(global_batch(0))
    names = {f"model.layers.{block}.mlp.experts.{key}" for block in (0, 1) for key in ("gate_up_proj", "down_proj")}
    assert set(record.float8_layers or ()) == set(record.float8_fallback or ()) == names
    with torch.no_grad():
        for ours, theirs in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
            theirs.copy_(ours)
    found, expected = engine.evaluate(global_batch(1)).loss, plain.evaluate(global_batch(1)).loss
    assert found == pytest.approx(expected, rel=1e-4)
    assert not any(isinstance(module, Float8Linear) for module in engine.model.modules())


@pytest.mark.parametrize(
    ("float8", "sentence"),
    [
        ({"measure_every": 5}, "measures nothing"),
        ({"linears": "all", "fallback_error": 0.05}, "needs measured steps"),
        (
            {"linears": "all", "fallback_error": 0.05, "measure_every": 5, "gather": "float8"},
            "their unquantised values do not arrive",
        ),
    ],
)
def test_keys_without_effect_are_refused(float8: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan.from_tables({"float8": float8})


def test_weights_of_layers_that_may_fall_back_travel_unquantised() -> None:
    plan = Plan.from_tables({"float8": {"linears": "all", "fallback_error": 0.05, "measure_every": 5}})
    assert plan.float8.gather == "weights"


def test_steps_that_overlap_are_not_measured() -> None:
    layout = {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}}
    with pytest.raises(NotBuiltError, match="micro-batches of several steps are in flight"):
        require_executable(Plan.from_tables({**tables(measure_every=5), **layout}))
