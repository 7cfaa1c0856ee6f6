"""Masters among the offloaded states: weights rest in the compute dtype, and every bit is that of float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import digests, offloaded, small_chunks, trained
from samples import by_default
from tiny import build_engine, global_batch, train_steps
from torch import nn

import weft.engine.offload.updates as offload_updates
from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.offload.slab import is_host_memory
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.ownership import local

AWAY = ("device, masters", "host, masters")
BF16: dict[str, Any] = {"precision": {"preset": "bf16"}}
LOW: dict[str, Any] = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
PLANS: dict[str, tuple[dict[str, Any], OptimizerPolicy]] = {
    "adamw": ({"pipeline": {"microbatches": 4}, **BF16}, OptimizerPolicy()),
    "recomputed": ({**BF16, "activations": {"policy": "full"}}, OptimizerPolicy()),
    "adamw, foreach": (BF16, OptimizerPolicy(kernel="foreach")),
    "adam": ({**BF16, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}, OptimizerPolicy(kind="adam")),
    "sgd with momentum": (BF16, OptimizerPolicy(kind="sgd", learning_rate=1e-2)),
    "sgd": (BF16, OptimizerPolicy(kind="sgd", learning_rate=1e-2, momentum=0.0)),
    "bfloat16 moments": ({**LOW, "data_parallel": {"zero": 3}}, OptimizerPolicy()),
    "float16": ({"precision": {"preset": "fp16"}}, OptimizerPolicy()),
}

DEFAULT = ("adamw", "bfloat16 moments")


@pytest.mark.parametrize("update", AWAY)
@pytest.mark.parametrize("name", by_default(DEFAULT, PLANS, extended=["recomputed"]))
def test_every_bit_is_that_of_masters_on_the_device(name: str, update: str) -> None:
    plan, policy = PLANS[name]
    expected = trained("qwen3-tied", plan, "", optimizer=policy)
    assert trained("qwen3-tied", plan, update, optimizer=policy) == expected


def test_weights_rest_rounded_and_masters_are_in_the_slab() -> None:
    engine = build_engine("qwen3-tied", offloaded(BF16, AWAY[0]), frozen=("model.layers.0.*",))
    train_steps(engine, 2)
    masters = engine.masters
    assert set(masters) == set(engine.parameters)
    for parameter, master in masters.items():
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert is_host_memory(master)
        assert torch.equal(parameter, master.to(torch.bfloat16))
        assert not torch.equal(master, master.to(torch.bfloat16).float())
    frozen = [value for value in engine.model.parameters() if not value.requires_grad]
    assert {value.dtype for value in frozen} == {torch.float32}
    assert {record.component: record.found for record in engine.dtypes()}["master_weights"] == ("float32",)
    assert {record.component: record.found for record in engine.dtypes()}["gradients"] == ("float32",)


@pytest.mark.parametrize(("first", "second"), [(AWAY[0], ""), ("", AWAY[1]), (AWAY[1], "device"), ("host", AWAY[0])])
def test_a_checkpoint_loads_wherever_masters_are(first: str, second: str, tmp_path: Path) -> None:
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
    assert digests(reader) == digests(writer)


def test_a_model_with_values_keeps_them_to_the_last_bit() -> None:
    found = []
    for update in ("", AWAY[0]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(257, 16), nn.Linear(16, 16), nn.Linear(16, 257))
        engine = Engine(model, Plan.from_tables(offloaded(BF16, update)), blocks=["1"], device="cpu")
        before = digests(engine)
        found.append((before, train_steps(engine, 2), digests(engine)))
    assert found[0] == found[1]


def test_a_weight_that_misses_its_update_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = offload_updates.round_into

    def stale(weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        if len(weights) > 1:
            original(weights[1:], masters[1:])

    expected = trained("qwen3-tied", BF16, "", steps=2)
    monkeypatch.setattr(offload_updates, "round_into", stale)
    for update in AWAY:
        assert trained("qwen3-tied", BF16, update, steps=2) != expected


def test_masters_that_weights_are_themselves_do_not_leave() -> None:
    with pytest.raises(NotBuiltError, match="their own masters"):
        build_engine("qwen3-tied", offloaded({}, AWAY[0]))
    with pytest.raises(NotBuiltError, match=r"without offload\.optimizer"):
        build_engine("qwen3-tied", {**BF16, "offload": {"masters": "host"}})


def test_local_shards_have_gradients_in_float32() -> None:
    """`fully_shard` would round them to the dtype of the shard."""
    plan = {**BF16, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}}
    engine = build_engine("qwen3-tied", offloaded(plan, AWAY[0]))
    seen: list[torch.Tensor] = []
    engine.on_gradients = lambda gradients: seen.extend(local(one) for one in gradients.values())
    train_steps(engine, 1)
    assert seen
    assert all(not torch.equal(one, one.bfloat16().float()) for one in seen if one.ndim == 2)
