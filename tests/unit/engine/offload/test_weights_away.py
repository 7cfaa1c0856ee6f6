"""Weights at rest on the host, one rank: bits of the run without offload, bounded staging, no stale weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import digests, offloaded, small_chunks, trained
from samples import by_default
from tiny import build_engine, global_batch, train_steps

from weft.core.errors import NotBuiltError
from weft.engine.engine import Engine
from weft.engine.offload.chunk_kernel import ChunkKernel
from weft.engine.offload.slab import is_host_memory
from weft.engine.offload.weights import MOST_UNITS, OffloadedWeights, _Unit
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.ownership import local

AWAY = ("device, weights", "host, weights")
BF16: dict[str, Any] = {"precision": {"preset": "bf16"}}
LOWEST: dict[str, Any] = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": "bfloat16"}}
PLANS: dict[str, tuple[dict[str, Any], OptimizerPolicy]] = {
    "one device": ({"pipeline": {"microbatches": 4}, **BF16}, OptimizerPolicy()),
    "float32, ZeRO-2": ({"data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}, OptimizerPolicy(kind="adam")),
    "recomputed, sgd": ({**BF16, "activations": {"policy": "full"}}, OptimizerPolicy(kind="sgd", learning_rate=1e-2)),
    "bfloat16 weights and moments": (LOWEST, OptimizerPolicy()),
    "float16": ({"precision": {"preset": "fp16"}}, OptimizerPolicy()),
}


@pytest.mark.parametrize("update", AWAY)
@pytest.mark.parametrize("name", by_default(["one device"], PLANS, extended=["float32, ZeRO-2"]))
def test_every_bit_is_that_of_weights_on_the_device(name: str, update: str) -> None:
    plan, policy = PLANS[name]
    expected = trained("qwen3-tied", plan, "", optimizer=policy)
    assert trained("qwen3-tied", plan, update, optimizer=policy) == expected


def stored_bytes(engine: Engine) -> int:
    """On the device, of all parameters between steps."""
    return sum(local(one.detach()).untyped_storage().nbytes() for one in engine.model.parameters())


def test_the_device_holds_no_weight_at_rest_and_few_units_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    load = _Unit.load

    def counted(self: _Unit) -> None:
        load(self)
        held.append(len(weights._waiting) + 1)

    monkeypatch.setattr(_Unit, "load", counted)
    frozen = ("model.layers.0.*",)
    engine = build_engine("qwen3-four", offloaded({**BF16, "pipeline": {"microbatches": 2}}, AWAY[0]), frozen=frozen)
    assert engine.offload is not None
    assert engine.offload.weights is not None
    weights = engine.offload.weights
    assert stored_bytes(engine) == 0
    train_steps(engine, 2)
    assert stored_bytes(engine) == 0
    assert held
    assert max(held) <= MOST_UNITS
    assert all(is_host_memory(home) for home in engine.offload.homes.values())
    assert {home.dtype for one, home in engine.offload.homes.items() if one.requires_grad} == {torch.bfloat16}
    assert set(engine.offload.homes) == set(engine.model.parameters())
    for parameter in engine.parameters:
        assert torch.equal(engine.offload.homes[parameter], engine.masters[parameter].to(torch.bfloat16))


def test_units_arrive_one_ahead() -> None:
    engine = build_engine("qwen3-four", offloaded(BF16, AWAY[0]))
    assert engine.offload is not None
    assert engine.offload.weights is not None
    weights = engine.offload.weights
    was_waiting: list[bool] = []
    for unit in weights._units:
        original = unit.load

        def load(original: Callable[[], None] = original) -> None:
            was_waiting.append(False)
            original()

        unit.load = load  # type: ignore[method-assign]
    around = weights._around

    def seen(place: int, unit: _Unit, *rest: Any) -> None:
        order.append((place, unit in weights._waiting))
        around(place, unit, *rest)

    order: list[tuple[int, bool]] = []
    weights._around = seen  # type: ignore[method-assign]
    train_steps(engine, 1)
    forward = [(0, False), (1, True), (2, True), (3, True), (4, True)]
    assert order == [*forward, (0, True), (4, True), (3, True), (2, True), (1, True)]
    assert len(was_waiting) == len(order)  # and nothing is loaded for nothing


@pytest.mark.parametrize(("first", "second"), [(AWAY[0], ""), ("", AWAY[1])])
def test_a_checkpoint_loads_with_and_without_weights_away(first: str, second: str, tmp_path: Path) -> None:
    plan = {"data_parallel": {"zero": 3}, **BF16}
    with small_chunks():
        writer, reader = (build_engine("qwen3-tied", offloaded(plan, update)) for update in (first, second))
    train_steps(writer, 2)
    writer.save(tmp_path)
    train_steps(reader, 1)
    assert reader.load(tmp_path) == 2
    assert digests(reader) == digests(writer)
    assert reader.evaluate(global_batch(7)).loss == writer.evaluate(global_batch(7)).loss
    assert train_steps(reader, 2, first=2) == train_steps(writer, 2, first=2)


class _StopError(Exception):
    pass


def stopped_midway(engine: Engine) -> None:
    """An evaluation that ends in the second block, while the third is on its way."""

    def stop(*_: Any) -> None:
        raise _StopError

    handle = engine.model.get_submodule(engine.layout.blocks[1]).register_forward_hook(stop)
    with pytest.raises(_StopError):
        engine.evaluate(global_batch(3))
    handle.remove()
    engine.strategy.after_evaluation()


def evaluated_after_load(folder: Path) -> bool:
    """Whether an engine whose evaluation was stopped evaluates a loaded checkpoint as another engine does."""
    engines = [build_engine("qwen3-four", offloaded(BF16, update)) for update in ("", AWAY[0])]
    train_steps(engines[0], 3)
    engines[0].save(folder)
    stopped_midway(engines[1])
    engines[1].load(folder)
    return engines[0].evaluate(global_batch(7)).loss == engines[1].evaluate(global_batch(7)).loss


def test_a_unit_on_its_way_is_dropped_when_weights_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluated_after_load(tmp_path / "right")
    monkeypatch.setattr(OffloadedWeights, "drop", lambda self: None)
    assert not evaluated_after_load(tmp_path / "wrong")


# --- planted bugs ----------------------------------------------------------------------------------------------------


def test_an_old_copy_that_is_gathered_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _Unit.load
    old: dict[_Unit, list[torch.Tensor]] = {}

    def stale(self: _Unit) -> None:
        original(self)
        kept = old.setdefault(self, [shard.clone() for _, shard, _ in self._shards])
        if self is next(iter(old)):
            for (_, shard, _), values in zip(self._shards, kept, strict=True):
                shard.copy_(values)

    expected = trained("qwen3-tied", BF16, "", steps=3)
    monkeypatch.setattr(_Unit, "load", stale)
    assert trained("qwen3-tied", BF16, AWAY[0], steps=3)[0] != expected[0]


@pytest.mark.parametrize("update", AWAY)
def test_a_unit_that_is_updated_twice_is_caught(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = ChunkKernel.update, []

    def twice(*args: Any, **kwargs: Any) -> None:
        calls.append(original(*args, **kwargs))  # type: ignore[func-returns-value]
        if len(calls) == 2:
            original(*args, **kwargs)

    expected = trained("qwen3-tied", BF16, "", steps=2)
    monkeypatch.setattr(ChunkKernel, "update", twice)
    assert trained("qwen3-tied", BF16, update, steps=2) != expected


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"offload": {"parameters": "cpu"}}, "offload.optimizer = 'none'"),
        (
            {"mesh": {"dp_replicate": 2}, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
            "replicas of all weights",
        ),
    ],
)
def test_what_does_not_stream_is_refused_by_name(tables: dict[str, Any], what: str) -> None:
    with pytest.raises(NotBuiltError, match=what):
        build_engine("llama", {**BF16, **tables})
