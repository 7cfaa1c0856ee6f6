"""Saved tensors of chosen blocks that leave the device: the bits of the run without, one copy per storage, one pool."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny import CPU, build_engine, global_batch
from torch import nn

import weft.engine.activations.kept_tensors as kept_tensors
import weft.engine.kernels.compiled as compiled
from weft.core.errors import NotBuiltError, PlanError
from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.engine.activations.kept_tensors import KeptTensors
from weft.engine.engine import Engine

AWAY: dict[str, Any] = {"offload": "cpu"}


@pytest.fixture(autouse=True)
def _small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tensors, "LEAST_BYTES", 1)


def trained(engine: Engine, steps: int = 3) -> dict[str, torch.Tensor]:
    """Losses, gradients of every step and weights at the end."""
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        engine.on_gradients = lambda named, step=step: found.update(
            {f"{step}.{name}": value.clone() for name, value in named.items()}
        )
        found[f"loss.{step}"] = torch.tensor(engine.step(global_batch(step, rows=4, length=12)).loss)
    return {**found, **{name: value.detach().clone() for name, value in engine.model.named_parameters()}}


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


def engine_of(family: str, activations: dict[str, Any], **tables: Any) -> Engine:
    return build_engine(family, {"pipeline": {"microbatches": 2}, **tables, "activations": activations})


def tensors_of(engine: Engine) -> KeptTensors:
    assert engine.inputs.tensors is not None
    return engine.inputs.tensors


@pytest.mark.parametrize(
    ("family", "number", "tables"),
    [
        ("llama", 6, {"data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}),
        ("gpt2-four", 3, {}),
        pytest.param("llama", 6, {}, marks=pytest.mark.extended),
        pytest.param("llama", 4, {"precision": {"preset": "bf16"}}, marks=pytest.mark.extended),
        pytest.param("qwen3-tied", 2, {"data_parallel": {"zero": 1}}, marks=pytest.mark.extended),
        pytest.param("mixtral", 2, {"data_parallel": {"zero": 2}}, marks=pytest.mark.extended),
    ],
)
def test_it_has_the_bits_of_the_run_without(family: str, number: int, tables: dict[str, Any]) -> None:
    """GPT-2 drops 0.1: its masks leave too; tied weights are two uses of one; two micro-batches share slots."""
    away = engine_of(family, {**AWAY, "offload_blocks": number}, **tables)
    assert differences(trained(engine_of(family, {}, **tables)), trained(away)) == []
    assert tensors_of(away).num_kept >= 3 * 2 * 4 * number
    gc.collect()
    assert tensors_of(away).device_tensors() == []
    assert len(away.inputs.slots._used) == 0


@pytest.mark.extended
def test_a_budget_offloads_inputs_and_saved_tensors() -> None:
    mixed = {"policy": "budget", "mixture": (2, 1)}
    away = engine_of("llama", {**mixed, **AWAY, "offload_blocks": 2})
    assert differences(trained(engine_of("llama", mixed)), trained(away)) == []
    assert away.inputs.num_kept == 3 * 2 * 2
    assert tensors_of(away).num_kept > 0


def test_the_pool_is_allocated_once() -> None:
    engine = engine_of("llama", {**AWAY, "offload_blocks": 3})
    trained(engine, steps=1)
    slots = engine.inputs.slots
    before = {slot.memory.untyped_storage().data_ptr() for slot in slots.all_slots()}, slots.nbytes
    assert len(before[0]) == 1
    trained(engine, steps=2)
    assert ({slot.memory.untyped_storage().data_ptr() for slot in slots.all_slots()}, slots.nbytes) == before
    assert not any(slot.is_ordinary for slot in slots.all_slots())


class Odd(nn.Module):
    """A block that saves a tensor twice, views of one storage, its weight's views, and a mask that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).chunk(3, -1)  # three views of one storage
        y = q.sigmoid() * k.transpose(0, 1).transpose(0, 1) * v
        return x + (y * y) * mask + x @ self.linear.weight[:8]


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(256, 8),
            nn.ModuleList(Odd() for _ in range(4)),
            nn.Linear(8, 256),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = torch.linspace(0.5, 1.0, 8).expand(*x.shape).contiguous()
        for block in self.blocks:
            x = block(x, mask)
        logits: torch.Tensor = self.head(x)
        return logits


def odd_engine(activations: dict[str, Any]) -> Engine:
    torch.manual_seed(0)
    return Engine(OddModel(), Plan.from_tables({"activations": activations}), blocks=["blocks"], device=CPU)


def test_a_storage_is_copied_once_and_weights_stay() -> None:
    """Of a block: its input, the storage of q, k and v, sigmoid(q), its product with k, y. No mask, no weight."""
    away = odd_engine({**AWAY, "offload_blocks": 4})
    assert differences(trained(odd_engine({})), trained(away)) == []
    assert tensors_of(away).num_kept == 3 * 4 * 5


class Overwritten(OddModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = torch.ones_like(x)
        for block in self.blocks:
            y = block(x, mask)
            with torch.no_grad():
                x.mul_(2.0)
            x = y
        logits: torch.Tensor = self.head(x)
        return logits


def test_a_saved_tensor_that_is_changed_in_place_is_refused() -> None:
    plan = Plan.from_tables({"activations": {**AWAY, "offload_blocks": 4}})
    engine = Engine(Overwritten(), plan, blocks=["blocks"], device=CPU)
    with pytest.raises(NotBuiltError, match="changes a tensor in place") as caught:
        engine.step(global_batch(0, rows=4, length=12))
    assert "offload_blocks = 0" in caught.value.hint


def test_the_device_has_one_block_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = odd_engine({**AWAY, "offload_blocks": 4})
    tensors, counts = tensors_of(engine), []
    backward = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda *args: (counts.append(len(tensors.device_tensors())), backward(*args))[1]
    )
    most = []
    bring = tensors._bring
    monkeypatch.setattr(tensors, "_bring", lambda kept: (bring(kept), most.append(len(tensors.device_tensors())))[0])
    trained(engine)
    assert set(counts) == {5}
    assert max(most) == 10


def test_evaluation_keeps_nothing() -> None:
    engine = engine_of("llama", {**AWAY, "offload_blocks": 6})
    assert engine.evaluate(global_batch(0, rows=4, length=12)).loss > 0
    assert tensors_of(engine).num_kept == 0
    assert engine_of("llama", {}).inputs.tensors is None


# torch's own tracing asks non-leaf tensors for gradients, and hides that warning only where warnings are no errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.extended
@pytest.mark.parametrize("zero", [0, 3])
def test_compiled_blocks(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled graph saves passes through the same hooks."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    tables = {"compile": {"enabled": True}, "data_parallel": {"zero": zero}, "precision": {"preset": "bf16"}}
    found = []
    for activations in ({}, {**AWAY, "offload_blocks": 4}):
        torch._dynamo.reset()
        engine = engine_of("llama", activations, **tables)
        found.append(trained(engine))
    assert differences(*found) == []
    assert tensors_of(engine).num_kept > 3 * 2 * 4


# --- planted bugs ------------------------------------------------------------------------------------------------


def _slot_reused_too_early(tensors: KeptTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tensors._slots
    take, give = slots.take, slots.give

    def taken(nbytes: int) -> Any:
        slot = take(nbytes)
        give(slot)
        return slot

    monkeypatch.setattr(slots, "take", taken)
    monkeypatch.setattr(slots, "give", lambda slot: None)


def _never_copied(tensors: KeptTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors._link, "bring", lambda slot, target: target.zero_())


def _views_are_lost(tensors: KeptTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    away = kept_tensors._Away

    def first(storage: Any, block: Any, size: Any, stride: Any, _offset: int, dtype: Any) -> Any:
        return away(storage, block, size, stride, 0, dtype)

    monkeypatch.setattr(kept_tensors, "_Away", first)
    monkeypatch.setattr(tensors, "_unpack", lambda packed: _unpacked(tensors, packed, away))


def _unpacked(tensors: KeptTensors, packed: Any, away: type) -> Any:
    if not isinstance(packed, away):
        return packed.tensor
    tensors._bring(packed.storage)
    return packed.storage.local.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)


@pytest.mark.parametrize("plant", [_slot_reused_too_early, _never_copied, _views_are_lost])
def test_planted_bugs_change_gradients(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(odd_engine({}), steps=1)
    broken = odd_engine({**AWAY, "offload_blocks": 4})
    plant(tensors_of(broken), monkeypatch)
    assert any(name.startswith("0.blocks") for name in differences(expected, trained(broken, steps=1)))


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"activations": {"offload_blocks": 1}}, r"offload_blocks with activations\.offload = 'none'"),
        ({"activations": {**AWAY, "policy": "full", "offload_blocks": 1}}, "every block is recomputed"),
        ({"activations": {**AWAY, "policy": "selective", "offload_blocks": 1}}, "every block is recomputed"),
        ({"activations": {**AWAY, "offload_blocks": 1}, "mesh": {"pp": 2}}, "a pipeline"),
    ],
)
def test_refusals_name_the_fix(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotBuiltError, match=sentence) as caught:
        require_executable(Plan.from_tables(tables))
    assert "activations." in caught.value.hint


@pytest.mark.parametrize("number", [7, "auto"])
def test_more_blocks_than_there_are(number: int | str) -> None:
    with pytest.raises(PlanError, match="offload_blocks") as caught:
        engine_of("llama", {**AWAY, "offload_blocks": number})
    assert caught.value.hint
