"""Precision on one process: masters, loss scaling, and a table of dtypes that tells the truth."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import CPU, build_engine, global_batch, train_steps
from tolerances import BF16_LOSS_ABS, BF16_SAME_LOSS_ABS
from torch import nn

from weft.core.plan import Plan
from weft.core.precision import policy_of
from weft.core.records import DtypeRecord
from weft.engine.engine import Engine
from weft.engine.objective import Batch, TokenClassifier
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.precision import LossScale, apply_compute_dtype, torch_dtype
from weft.models.layout import describe

COMPUTE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def by_component(records: list[DtypeRecord]) -> dict[str, DtypeRecord]:
    return {record.component: record for record in records}


def test_what_a_caller_does_with_gradients_is_not_in_the_table() -> None:
    """Verification gathers float32 gradients inside the step; the step itself gathers bfloat16 weights."""
    engine = build_engine("llama", {"precision": {"preset": "bf16"}, "data_parallel": {"zero": 3}})
    calls = []

    def look(gradients: dict[str, torch.Tensor]) -> None:
        calls.append(len(gradients))
        dist.all_gather([torch.empty(64)], torch.zeros(64))

    engine.on_gradients = look
    train_steps(engine, 1)
    assert calls
    assert all(record.ok for record in engine.dtypes()), engine.dtypes()


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp16"])
def test_the_table_says_what_was_asked(preset: str, zero: int) -> None:
    engine = build_engine("llama", {"precision": {"preset": preset}, "data_parallel": {"zero": zero}})
    assert engine.dtypes() == []
    train_steps(engine, 1)
    rows = by_component(engine.dtypes())
    assert rows.keys() >= {
        "weights",
        "activations",
        "gradients",
        "master_weights",
        "first_moment",
        "second_moment",
        "loss",
        "logits",
        "softmax",
        "norm_statistics",
        "residual",
        "products",
    }
    assert all(record.ok for record in rows.values()), rows
    assert rows["weights"].found == rows["activations"].found == (COMPUTE[preset],)
    assert (
        rows["master_weights"].found
        == rows["gradients"].found
        == rows["first_moment"].found
        == rows["second_moment"].found
        == ("float32",)
    )
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}


def test_the_table_says_when_it_differs() -> None:
    """A model that computes in float32 although bfloat16 was asked, and a master that is not float32."""
    engine = build_engine("llama", {"precision": {"preset": "bf16"}})
    block = engine.model.get_submodule("model.layers.0")
    block.register_forward_hook(lambda _module, _args, output: output.float(), prepend=True)
    train_steps(engine, 1)
    rows = by_component(engine.dtypes())
    assert not rows["activations"].ok
    assert rows["activations"].found == ("float32",)
    assert rows["weights"].ok

    low = Engine(nn.Linear(4, 4).bfloat16(), Plan(), objective=Squares(), device=CPU)
    low.step({"x": torch.ones(2, 4, dtype=torch.bfloat16)})
    assert [record.component for record in low.dtypes() if record.ok] == ["loss"]


class Squares:
    def weight(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(batch["x"].shape[0])

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"]).float().square().sum()


def test_8_bit_moments_are_a_row_of_their_own() -> None:
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    engine = Engine(model, Plan(), optimizer=OptimizerPolicy(kind="adamw8bit"), device=CPU)
    engine.step(global_batch(0))
    rows = by_component(engine.dtypes())
    assert rows["quantised_state"].found == ("uint8",)
    assert rows["first_moment"].found == rows["second_moment"].found == ("float32",)  # the vectors'
    assert all(record.ok for record in rows.values())


def test_bf16_is_near_fp32_and_does_not_depend_on_micro_batches() -> None:
    fp32 = train_steps(build_engine("llama"), 5)
    bf16 = train_steps(build_engine("llama", {"precision": {"preset": "bf16"}}), 5)
    cut = train_steps(build_engine("llama", {"precision": {"preset": "bf16"}, "pipeline": {"microbatches": 4}}), 5)
    for (expected, _), (found, _), (other, _) in zip(fp32, bf16, cut, strict=True):
        assert found == pytest.approx(expected, abs=BF16_LOSS_ABS)
        assert other == pytest.approx(found, abs=BF16_SAME_LOSS_ABS)
    assert fp32 != bf16


class Scaled(TokenClassifier):
    """The usual loss times a factor: large ones overflow float16 gradients."""

    factor = 1.0

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss_sum(model, batch) * self.factor


def test_an_overflow_halves_the_scale_and_skips_the_update() -> None:
    objective = Scaled()
    engine = build_engine("llama", {"precision": {"preset": "fp16"}}, objective=_named(objective))
    first = engine.step(global_batch(0))
    assert (first.skipped, first.loss_scale) == (False, 2.0**16)
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    moments = {key: value.clone() for key, value in engine.state().items() if key.startswith("optim.")}
    objective.factor = 1e6
    record = engine.step(global_batch(1))
    assert (record.skipped, record.loss_scale) == (True, 2.0**15)
    assert all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())
    assert all(torch.equal(moments[key], value) for key, value in engine.state().items() if key in moments)
    objective.factor = 1.0
    record = engine.step(global_batch(2))
    assert (record.skipped, record.loss_scale) == (False, 2.0**15)
    assert not all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())
    assert engine.scalars()["loss_scale"] == {"value": 2.0**15, "good_steps": 1}


def _named(objective: Scaled) -> Any:
    """Hugging Face models take names."""
    inner = objective.loss_sum

    class Adapter:
        weight = objective.weight

        def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            return inner(lambda ids: model(input_ids=ids, use_cache=False), batch)  # type: ignore[arg-type]

    return Adapter()


def test_the_norm_of_a_scaled_loss_is_that_of_the_loss() -> None:
    fp16 = train_steps(build_engine("llama", {"precision": {"preset": "fp16"}}), 2)
    fp32 = train_steps(build_engine("llama"), 2)
    for (_, found), (_, expected) in zip(fp16, fp32, strict=True):
        assert found == pytest.approx(expected, rel=BF16_LOSS_ABS)


def test_loss_scale_grows_after_good_steps_and_comes_back_from_its_state() -> None:
    scale = LossScale(enabled=True, initial=8.0, grow_after=2)
    scale.update(is_finite=True)
    assert scale.value == 8.0
    scale.update(is_finite=True)
    assert (scale.value, scale.good_steps) == (16.0, 0)
    scale.update(is_finite=True)
    scale.update(is_finite=False)
    assert (scale.value, scale.good_steps) == (8.0, 0)
    for _ in range(10):
        scale.update(is_finite=False)
    assert scale.value == 1.0
    other = LossScale(enabled=True)
    other.restore({"value": 4.0, "good_steps": 7})
    assert other.state() == {"value": 4.0, "good_steps": 7}
    off = LossScale(enabled=False)
    off.update(is_finite=False)
    off.restore({"value": 4.0, "good_steps": 7})
    assert off.value == 1.0


def test_an_exception_in_forward_leaves_the_masters_in_place() -> None:
    engine = build_engine("llama", {"precision": {"preset": "bf16"}})
    block = engine.model.get_submodule("model.layers.1")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = block.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.step(global_batch(0))
    handle.remove()
    assert all(isinstance(p, nn.Parameter) and p.dtype is torch.float32 for p in engine.model.parameters())
    assert engine.step(global_batch(0)).loss > 0


def test_small_gradients_survive_many_micro_batches() -> None:
    """256 micro-batches whose gradients are 1/256 of the first's: summed in bfloat16 they would vanish."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Identity())
    nn.init.constant_(model[0].weight, 0.0)
    rows = 257
    plan = Plan.from_tables({"precision": {"preset": "bf16"}, "pipeline": {"microbatches": rows}})

    class Linear:
        def weight(self, batch: Batch) -> torch.Tensor:
            return torch.tensor(1.0)

        def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            return model(batch["x"]).float().sum()

    engine = Engine(model, plan, objective=Linear(), device=CPU, clip_norm=0.0)
    x = torch.full((rows, 2), 2.0**-8)
    x[0] = 1.0
    record = engine.step({"x": x})
    assert record.grad_norm == pytest.approx(2.0 * 2**0.5)  # 1 + 256/256 in each of two entries


def test_micro_batches_in_flight_share_a_cast() -> None:
    """A pipeline would have a copy of its weights for each of them; an update must reach the next one all the same."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    apply_compute_dtype(model, describe(model, blocks=["0", "1"]), policy_of("bf16"))
    used: list[torch.Tensor] = []
    original = nn.functional.linear

    def noting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        used.append(weight)
        return original(x, weight, bias)

    x = torch.ones(2, 4)
    with mock.patch.object(nn.functional, "linear", noting):
        first, second = model(x), model(x)
        assert used[1] is used[3]
        first.float().sum().backward()
        alone = model[1].weight.grad.clone()
        second.float().sum().backward()
        torch.testing.assert_close(model[1].weight.grad, 2 * alone)
        with torch.no_grad():
            model[1].weight.zero_()
        assert not model(x).any()


def test_dtype_names() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(TypeError, match="not a torch dtype"):
        torch_dtype("nn")
