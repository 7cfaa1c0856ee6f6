"""8-bit moments on the host: codes and scales stream, and every bit is that of the run without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offloaded import digests, offloaded, small_chunks, trained
from tiny import build_engine, train_steps

from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.offload.slab import is_host_memory
from weft.engine.optim.adamw_8bit import quantised_parts
from weft.engine.optim.optimizers import OptimizerPolicy

UPDATES = ("device", "host")
POLICY = OptimizerPolicy(kind="adamw8bit", learning_rate=1e-3)
# blocks of 64 and 128, and the matrices of 96 columns keep float32 moments
WIDE = ModelSpec(
    type="llama",
    config={
        "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
)  # fmt: skip
SHARDED: dict[str, Any] = {"data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}


def engine_of(update: str, *, delayed: bool = False) -> Engine:
    plan = offloaded({"pipeline": {"microbatches": 2}}, update)
    if delayed:
        plan["offload"] = {**plan["offload"], "delayed": True}
    with small_chunks():
        return build_engine(WIDE, plan, optimizer=POLICY)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"pipeline": {"microbatches": 2}}, id="one device"),
        pytest.param(SHARDED, id="ZeRO-3", marks=pytest.mark.extended),
    ],
)
def test_every_bit_is_that_of_the_run_without_offload(plan: dict[str, Any], update: str) -> None:
    expected = trained(WIDE, plan, "", optimizer=POLICY, steps=3)
    assert trained(WIDE, plan, update, optimizer=POLICY, steps=3) == expected


def test_codes_and_scales_lie_on_the_host() -> None:
    engine = engine_of("device")
    states = [state["exp_avg"] for state in engine.optimizer.state.values()]
    quantised = [parts for parts in map(quantised_parts, states) if parts is not None]
    assert {parts.codes.numel() // parts.scales.numel() for parts in quantised} == {64, 128}
    assert all(is_host_memory(parts.codes) and is_host_memory(parts.scales) for parts in quantised)
    assert engine.offload is not None
    numel = sum(parameter.numel() for parameter in engine.parameters)
    assert 2 * numel < engine.offload.memory.slab._memory.nbytes < 4 * numel


@pytest.mark.parametrize(("first", "second"), [("device", ""), ("", "host")])
def test_a_checkpoint_loads_with_and_without_offload(first: str, second: str, tmp_path: Path) -> None:
    writer, reader = engine_of(first), engine_of(second)
    train_steps(writer, 2)
    writer.save(tmp_path)
    assert reader.load(tmp_path) == 2
    assert digests(reader) == digests(writer)
    assert train_steps(reader, 1, first=2) == train_steps(writer, 1, first=2)
    assert digests(reader) == digests(writer)


@pytest.mark.extended
@pytest.mark.parametrize("update", UPDATES)
def test_delayed_and_drained_it_has_the_same_bits(update: str) -> None:
    plain, engine = engine_of(""), engine_of(update, delayed=True)
    for step in range(3):
        assert train_steps(engine, 1, first=step) == train_steps(plain, 1, first=step)
        assert digests(engine) == digests(plain)
