"""`StepGuard`: after a bad step an engine is as it was before, buffers and router counts too."""

from __future__ import annotations

import math
from typing import Any

import buffered
import pytest
import tiny
import torch
from planted import bad_samples
from router_engines import FAMILIES

from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.step_guard import StepGuard

MOE = ModelSpec(type="qwen3_moe", config=FAMILIES["qwen3_moe"])


def guarded_step(engine: Engine, guard: StepGuard, batch: dict[str, Any]) -> tuple[float, bool]:
    engine.guard = guard
    guard.begin()
    record = engine.step(batch)
    if guard.found is not None:
        guard.undo()
    return record.loss, record.skipped


@pytest.mark.parametrize("bad", [0, 2], ids=["first step", "later step"])
def test_buffers_are_those_before_the_bad_step(bad: int) -> None:
    engine, clean = buffered.build(), buffered.build()
    guard = StepGuard(engine, spike_factor=0.0, window=8)
    for step in range(4):
        batch = buffered.global_batch(step)
        if step == bad:
            batch["inputs"][0, 0] = math.nan
            assert guarded_step(engine, guard, batch)[1]
            clean.steps_done += 1
        else:
            assert guarded_step(engine, guard, batch) == (clean.step(batch).loss, False)
    for (name, value), (_, other) in zip(engine.state().items(), clean.state().items(), strict=True):
        assert torch.equal(value, other), name
    for (name, value), (_, other) in zip(engine.model.named_buffers(), clean.model.named_buffers(), strict=True):
        assert torch.equal(value, other), name


def test_the_next_balancing_loss_reads_no_choice_of_a_bad_step() -> None:
    def build() -> Engine:
        return tiny.build_engine(MOE, router=RouterSpec(balance_loss=0.1), optimizer=OptimizerPolicy(learning_rate=0.1))

    engine, clean = build(), build()
    guard = StepGuard(engine, spike_factor=0.0, window=8)
    for step in range(4):
        batch = tiny.global_batch(step)
        if step == 1:
            batch["input_ids"][0, 0] = 255
            with bad_samples([]):
                assert guarded_step(engine, guard, batch)[1]
            clean.steps_done += 1
            continue
        batch["input_ids"][batch["input_ids"] == 255] = 0
        assert guarded_step(engine, guard, batch) == (clean.step(batch).loss, False)


def test_an_overflow_of_scaled_gradients_is_left_to_the_loss_scale() -> None:
    engine = tiny.build_engine("llama", {"precision": {"preset": "fp16"}})
    guard = StepGuard(engine, spike_factor=0.0, window=8)
    engine.loss_scale.value = 2.0**60
    _, skipped = guarded_step(engine, guard, tiny.global_batch(0))
    assert skipped
    assert guard.found is None
    assert engine.loss_scale.value < 2.0**60
