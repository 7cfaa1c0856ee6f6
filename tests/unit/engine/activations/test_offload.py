"""Inputs of recomputed blocks that leave the device: bits of plain recompute, one tensor per block, a fixed pool."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny import CPU, build_engine, global_batch
from torch import nn
from torch._dynamo.utils import counters

import weft.engine.activations.host_slots as host_slots
import weft.engine.kernels.compiled as compiled
from weft.core.errors import MemoryLimitError, NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.activations.host_slots import HostSlots
from weft.engine.activations.kept_inputs import KeptInputs
from weft.engine.engine import Engine

FULL = {"policy": "full"}


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


def engine_of(family: str | ModelSpec, activations: dict[str, Any], **tables: Any) -> Engine:
    plan = {"pipeline": {"microbatches": 2}, **tables, "activations": activations}
    return build_engine(family, plan)


def kept_by(engine: Engine) -> KeptInputs:
    assert engine.inputs.is_on
    return engine.inputs


@pytest.mark.parametrize(
    ("family", "tables"),
    [
        ("llama", {}),
        ("llama", {"precision": {"preset": "bf16"}}),
        ("llama", {"data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}),
        ("qwen3-tied", {"data_parallel": {"zero": 1}}),
        ("gpt2-four", {}),
        ("mixtral", {}),
        ("mixtral", {"data_parallel": {"zero": 2}}),
    ],
)
def test_it_has_the_bits_of_plain_recompute(family: str, tables: dict[str, Any]) -> None:
    """GPT-2 drops 0.1; a mixture replays its choices; two micro-batches reuse each other's slots."""
    plain = engine_of(family, FULL, **tables)
    away = engine_of(family, {**FULL, "offload": "cpu"}, **tables)
    assert differences(trained(plain), trained(away)) == []
    kept = kept_by(away)
    blocks = len(away.layout.blocks)
    assert kept.num_kept == 3 * 2 * blocks  # one tensor per block, micro-batch and step
    assert kept.slots.num_slots == blocks


def test_a_budget_offloads_its_fully_recomputed_blocks() -> None:
    mixed = {"policy": "budget", "mixture": (2, 1)}
    away = engine_of("llama", {**mixed, "offload": "cpu"})
    assert differences(trained(engine_of("llama", mixed)), trained(away)) == []
    assert kept_by(away).num_kept == 3 * 2 * 2


def test_frozen_embeddings() -> None:
    """The input of the first block needs no gradient, and leaves all the same."""
    engines = [
        build_engine("llama", {"activations": {**FULL, "offload": offload}}, frozen=["model.embed_tokens.*"])
        for offload in ("none", "cpu")
    ]
    assert differences(trained(engines[0]), trained(engines[1])) == []
    assert kept_by(engines[1]).num_kept == 3 * len(engines[1].layout.blocks)


# --- modules that are not Hugging Face's -------------------------------------------------------------------------


class Attended(nn.Module):
    """Blocks that take an encoder's output by keyword, the hidden states twice, or both by keyword."""

    def __init__(self, *, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(256, 8)
        self.side = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Crossed() for _ in range(3))
        self.head = nn.Linear(8, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        side = self.side(x).tanh()
        if self.kind == "expanded":
            side = side[:, :1].expand_as(x)
        if self.kind == "transposed":
            x = x.transpose(0, 1)
            side = side.transpose(0, 1)
        for block in self.blocks:
            if self.kind == "twice":
                x = block(x, x)
            elif self.kind == "keywords":
                x = block(side=side, x=x)
            elif self.kind == "strided":
                x = block(torch.cat([x, x], -1)[..., ::2], side=side)
            else:
                x = block(x, side=side)
        logits: torch.Tensor = self.head(x.transpose(0, 1) if self.kind == "transposed" else x)
        return logits


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh() * side.sigmoid()


def attended_engine(kind: str, offload: str) -> Engine:
    torch.manual_seed(0)
    plan = Plan.from_tables({"activations": {**FULL, "offload": offload}})
    return Engine(Attended(kind=kind), plan, blocks=["blocks"], device=CPU)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("side", 3 + 1), ("twice", 3), ("keywords", 3 + 1), ("transposed", 3 + 1), ("strided", 3 + 1), ("expanded", 3)],
)
def test_a_tensor_given_twice_is_kept_once(kind: str, count: int) -> None:
    """An encoder's output is an input of every block: one slot, one copy each way."""
    away = attended_engine(kind, "cpu")
    assert differences(trained(attended_engine(kind, "none")), trained(away)) == []
    assert kept_by(away).num_kept == 3 * count


def test_a_tensor_changed_in_place_is_another_tensor() -> None:
    """The second block gets the same storage with other values: versions tell them apart."""
    kept = KeptInputs(device=CPU, offloads=True, group=None)
    x = torch.ones(4)
    first = kept.keep(x)
    assert kept.keep(x.detach()) is first
    x.add_(1)
    assert kept.keep(x) is not first
    assert torch.equal(kept.fetch(kept.keep(x)), x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, 8), nn.ModuleList(Doubled() for _ in range(2))
        self.head = nn.Linear(8, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + 0.0
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        return self.linear(x) + x


def test_a_block_that_changes_its_input_is_refused() -> None:
    plan = Plan.from_tables({"activations": {**FULL, "offload": "cpu"}})
    engine = Engine(InPlace(), plan, blocks=["blocks"], device=CPU)
    with pytest.raises(NotBuiltError, match="changes its input in place") as caught:
        engine.step(global_batch(0, rows=4, length=12))
    assert caught.value.hint


# --- memory -------------------------------------------------------------------------------------------------


def test_the_pool_is_allocated_once_and_its_slots_have_the_inputs_size() -> None:
    engine = engine_of("llama", {**FULL, "offload": "cpu"})
    trained(engine, steps=1)
    slots = kept_by(engine).slots
    memory = {slot.memory.untyped_storage().data_ptr() for slot in slots.all_slots()}
    assert len(memory) == 1  # one slab
    assert {slot.nbytes for slot in slots.all_slots()} == {2 * 12 * 32 * 4}
    assert not any(slot.is_ordinary for slot in slots.all_slots())
    trained(engine, steps=3)
    assert {slot.memory.untyped_storage().data_ptr() for slot in slots.all_slots()} == memory
    assert slots.num_slots == 6


def test_the_device_has_two_inputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", {**FULL, "offload": "cpu"})
    kept = kept_by(engine)
    most = 0

    def looked(call: Any) -> Any:
        def seen(*args: Any) -> Any:
            nonlocal most
            result = call(*args)
            most = max(most, len(kept.device_tensors()))
            return result

        return seen

    for name in ("keep", "after_block", "fetch", "bring"):
        monkeypatch.setattr(kept, name, looked(getattr(kept, name)))
    trained(engine)
    assert most == 2
    gc.collect()
    assert kept.device_tensors() == []


def test_slots_of_longer_batches_replace_shorter_ones() -> None:
    engine = engine_of("llama", {**FULL, "offload": "cpu"})
    plain = engine_of("llama", FULL)
    slots = kept_by(engine).slots
    for step, length in enumerate((8, 16, 12, 16, 8)):
        batch = global_batch(step, rows=4, length=length)
        assert engine.step(batch).loss == plain.step(batch).loss
        assert slots.num_slots == 6
        assert not any(slot.is_ordinary for slot in slots.all_slots())
    assert {slot.nbytes for slot in slots.all_slots()} == {2 * 16 * 32 * 4}


def test_a_forward_without_backward_returns_its_slots() -> None:
    kept = KeptInputs(device=CPU, offloads=True, group=None)
    for _ in range(4):
        inputs = []
        for _ in range(3):
            inputs.append(kept.of_block([torch.ones(8, 8)], {}))
            kept.after_block(inputs[-1])
        inputs.clear()
        kept.begin_forward()
        kept.finish_step()
    assert kept.slots.num_slots <= 4


def test_slots_in_use_between_steps_are_replaced_later() -> None:
    """A pipeline that never flushes has inputs on the host when a step ends."""
    slots = HostSlots(pinned=False)
    held = slots.take(100)
    other = slots.take(100)
    slots.give(other)
    slots.settle()
    assert held in slots.all_slots()
    assert held.is_replaced
    slots.give(held)
    assert [slot.is_ordinary for slot in slots.all_slots()] == [False, False]
    slots.settle()
    assert slots.num_slots == 2


def test_too_little_host_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slots, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryLimitError, match=r"1.9 MiB of pinned host memory") as caught:
        host_slots.pinned_bytes(2_000_000)
    assert "activations.offload" in caught.value.hint


def test_evaluation_keeps_nothing() -> None:
    engine = engine_of("llama", {**FULL, "offload": "cpu"})
    assert engine.evaluate(global_batch(0, rows=4, length=12)).loss > 0
    assert kept_by(engine).num_kept == 0


def test_without_the_key_there_is_nothing() -> None:
    engine = engine_of("llama", FULL)
    trained(engine, steps=1)
    assert not engine.inputs.is_on
    assert (engine.inputs.num_kept, engine.inputs.slots.num_slots) == (0, 0)


# --- compiled blocks ---------------------------------------------------------------------------------------------


# torch's own tracing asks non-leaf tensors for gradients, and hides that warning only where warnings are no errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("zero", [0, 3])
def test_compiled_blocks_have_the_same_graphs(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputed input passes the guards of the first one: no block is compiled again."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    tables = {"compile": {"enabled": True}, "data_parallel": {"zero": zero}}
    found, graphs = [], []
    for offload in ("none", "cpu"):
        torch._dynamo.reset()
        counters.clear()
        found.append(trained(engine_of("llama", {**FULL, "offload": offload}, **tables)))
        graphs.append(counters["stats"]["unique_graphs"])
    assert differences(*found) == []
    assert graphs[0] == graphs[1] > 0


# --- planted bugs ------------------------------------------------------------------------------------------------


def _slot_reused_too_early(kept: KeptInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    take = kept.slots.take
    monkeypatch.setattr(kept.slots, "take", lambda nbytes: _given_back(kept.slots, take(nbytes)))


def _given_back(slots: HostSlots, slot: Any) -> Any:
    slots.give(slot)
    return slot


def _wrong_block(kept: KeptInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, held = kept.fetch, []

    def of_another(one: Any) -> Any:
        held.append(fetch(one))
        return held[max(0, len(held) - 2)]

    monkeypatch.setattr(kept, "fetch", of_another)


def _never_copied(kept: KeptInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept._link, "bring", lambda slot, target: target.zero_())


@pytest.mark.parametrize("plant", [_slot_reused_too_early, _wrong_block, _never_copied])
def test_planted_bugs_change_gradients(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(engine_of("llama", FULL), steps=1)
    broken = engine_of("llama", {**FULL, "offload": "cpu"})
    plant(kept_by(broken), monkeypatch)
    assert any(name.startswith("0.model.layers") for name in differences(expected, trained(broken, steps=1)))


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "sentence", "hint"),
    [
        (
            {"activations": {"offload": "cpu"}},
            "activations.offload with activations.policy = 'none'",
            "policy = 'full'",
        ),
        (
            {"activations": {"offload": "cpu", "policy": "selective"}},
            "activations.offload with activations.policy = 'selective'",
            "policy = 'full'",
        ),
        ({"activations": {"partition": True}}, "activations.partition with activations.policy", "policy = 'full'"),
        ({"activations": {"partition": True, "policy": "full"}}, "mesh.tp = 1", "partition = false"),
        (
            {"activations": {"partition": True, "policy": "full"}, "mesh": {"tp": 2}},
            "sequence parallel, where inputs of blocks are slices",
            "partition = false",
        ),
        (
            {
                "activations": {"partition": True, "policy": "full"},
                "mesh": {"tp": 4},
                "tensor_parallel": {"mode": "2d"},
            },
            "tensor_parallel.mode = '2d', where inputs are local shards",
            "partition = false",
        ),
    ],
)
def test_refusals_name_the_fix(tables: dict[str, Any], sentence: str, hint: str) -> None:
    from weft.core.executable import require_executable

    with pytest.raises(NotBuiltError, match=sentence) as caught:
        require_executable(Plan.from_tables(tables))
    assert hint in caught.value.hint
