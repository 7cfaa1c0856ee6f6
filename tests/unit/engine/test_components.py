"""Every component of [precision]: what is asked is what live tensors show, and the key changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from router_engines import FAMILIES
from tiny import build_engine, global_batch, train_steps

from weft.core.precision_presets import PRESETS
from weft.core.records import DtypeRecord
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.optim.optimizers import OptimizerPolicy

MOE = ModelSpec(type="qwen3_moe", config=FAMILIES["qwen3_moe"])


def rows_of(precision: dict[str, Any], *, model: str | ModelSpec = "llama", **options: Any) -> dict[str, DtypeRecord]:
    engine = build_engine(model, {"precision": precision, **options.pop("plan", {})}, **options)
    train_steps(engine, 1)
    return {record.component: record for record in engine.dtypes()}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_and_its_table_is_as_asked(name: str) -> None:
    fast = OptimizerPolicy(learning_rate=0.01)
    engine = build_engine(MOE, {"precision": {"preset": name}}, router=RouterSpec(balance_loss=0.1), optimizer=fast)
    losses = [loss for loss, _ in train_steps(engine, 6)]
    assert losses[-1] < losses[0]
    rows = {record.component: record for record in engine.dtypes()}
    assert all(record.ok for record in rows.values()), rows
    seen = {"weights", "products", "activations", "residual", "gradients", "master_weights", "first_moment"}
    assert rows.keys() >= seen | {"second_moment", "norm_statistics", "softmax", "router", "aux_loss", "logits", "loss"}
    if name == "deepseek-v3":
        assert "float8_e4m3" in rows["products"].found
        assert rows["first_moment"].found == rows["second_moment"].found == ("bfloat16",)
    if name == "tf32":
        assert (rows["products"].asked, rows["products"].found) == ("tf32", ("float32",))
        assert rows["products"].note
    if name not in ("fp32", "tf32", "fp16"):
        assert rows["router"].found == rows["aux_loss"].found == ("float32",)


@pytest.mark.parametrize(
    ("given", "component", "found"),
    [
        ({"first_moment": "bfloat16"}, "first_moment", "bfloat16"),
        ({"first_moment": "bfloat16"}, "second_moment", "float32"),
        ({"second_moment": "bfloat16"}, "second_moment", "bfloat16"),
        ({"gradients": "bfloat16"}, "gradients", "bfloat16"),
        ({"gradients": "bfloat16"}, "master_weights", "float32"),
        ({"master_weights": "bfloat16", "gradients": "float32"}, "gradients", "float32"),
        ({"master_weights": "bfloat16", "gradients": "float32"}, "master_weights", "bfloat16"),
        ({"logits": "float32"}, "logits", "float32"),
        ({"weights": "float32"}, "weights", "float32"),
        ({"products": "float8_e4m3"}, "products", "float8_e4m3"),
    ],
)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_component_is_what_live_tensors_show(given: dict[str, str], component: str, found: str, zero: int) -> None:
    rows = rows_of({"preset": "bf16", **given}, plan={"data_parallel": {"zero": zero}})
    assert rows[component].found == (found,), rows[component]
    assert all(record.ok for record in rows.values()), rows


def test_the_router_of_a_preset_is_a_key() -> None:
    assert rows_of({"preset": "bf16"}, model=MOE)["router"].found == ("float32",)
    rows = rows_of({"preset": "bf16", "router": "bfloat16"}, model=MOE, router=RouterSpec(z_loss=0.1))
    assert rows["router"].found == ("bfloat16",)
    assert rows["aux_loss"].found == ("float32",)


def test_narrow_gradients_change_the_run_and_little() -> None:
    wide = train_steps(build_engine("llama", {"precision": {"preset": "bf16"}, "pipeline": {"microbatches": 4}}), 4)
    tables = {"precision": {"preset": "bf16", "gradients": "bfloat16"}, "pipeline": {"microbatches": 4}}
    narrow = train_steps(build_engine("llama", tables), 4)
    assert wide != narrow
    for (expected, _), (found, _) in zip(wide, narrow, strict=True):
        assert found == pytest.approx(expected, abs=5e-3)


def test_a_router_that_was_not_found_computes_as_the_rest() -> None:
    """The preset alone asks for float32: the model trains, the table tells, and a note says why."""
    spec = ModelSpec(type="qwen3_moe", config=FAMILIES["qwen3_moe"])
    plan = {
        "precision": {"preset": "bf16"},
        "offload": {"optimizer": "cpu", "delayed": True},
    }
    engine = build_engine(spec, plan)
    assert engine.plan.precision.policy().router == "bfloat16"
    assert any("routers compute in bfloat16" in note for note in engine.notes)


def test_tf32_is_on_in_its_own_steps_alone() -> None:
    engine, plain = (build_engine("llama", {"precision": {"preset": name}}) for name in ("tf32", "fp32"))
    found: list[bool] = []
    for one in (engine, plain):
        block = one.model.get_submodule("model.layers.0")
        block.register_forward_hook(lambda *_: found.append(torch.backends.cuda.matmul.allow_tf32))
    train_steps(engine, 1)
    train_steps(plain, 1)
    engine.evaluate(global_batch(0))
    assert found == [True, False, True]
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("zero", [0, 3])
def test_states_exist_before_the_first_step_of_a_resumed_run(zero: int) -> None:
    """Gradients of zero make them, which must have the dtype of gradients."""
    tables = {"precision": {"preset": "bf16", "gradients": "bfloat16"}, "data_parallel": {"zero": zero}}
    state = build_engine("llama", tables).state()
    assert any(name.endswith("exp_avg") for name in state)
