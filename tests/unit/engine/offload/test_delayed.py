"""Delayed updates on one rank: what a step reads, what lands when, and the bits of drained runs and of resumes.

`weft verify` holds whole runs against one process (tests/multiproc/verify/test_delayed_offload.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import digests, offloaded, small_chunks
from tiny import build_engine, global_batch, train_steps

from weft.core.errors import NotBuiltError
from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.offload.chunk_kernel import ChunkKernel
from weft.engine.optim.optimizers import OptimizerPolicy

UPDATES = ("device", "host")
RATES = (1e-2, 3e-2, 1e-3, 2e-2)


def late(plan: dict[str, Any], update: str) -> dict[str, Any]:
    found = offloaded(plan, update)
    return {**found, "offload": {**found["offload"], "delayed": True}}


def engine_of(plan: dict[str, Any], update: str, **options: Any) -> Engine:
    with small_chunks():
        return build_engine("qwen3-tied", late(plan, update) if update else plan, **options)


def weights(engine: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.parameters]


@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.extended)])
@pytest.mark.parametrize("update", UPDATES)
def test_drained_after_every_step_it_has_every_bit_of_the_run_without_delay(update: str, kind: str) -> None:
    plan = {"pipeline": {"microbatches": 2}, "precision": {"preset": "bf16"}}
    policy = OptimizerPolicy(kind=kind, learning_rate=1e-2)  # type: ignore[arg-type]
    plain, engine = engine_of(plan, "", optimizer=policy), engine_of(plan, update, optimizer=policy)
    for step, rate in enumerate(RATES):
        batch = global_batch(step)
        ours, theirs = (one.step(batch, learning_rate=rate) for one in (engine, plain))
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
        assert digests(engine) == digests(plain)  # reads the state, which lands the update


def test_the_second_step_reads_the_first_weights_and_the_third_the_first_update() -> None:
    plain, engine = engine_of({}, ""), engine_of({}, "host")
    first = weights(engine)
    assert engine.step(global_batch(0)).loss == plain.step(global_batch(0)).loss
    assert all(map(torch.equal, weights(engine), first))
    updated = weights(plain)
    engine.step(global_batch(1))
    assert all(map(torch.equal, weights(engine), updated))
    assert engine.step(global_batch(2)).loss == plain.step(global_batch(2)).loss  # after the first update


def test_evaluations_and_drains_change_nothing_and_both_places_agree() -> None:
    found = []
    for update, looks in (("device", False), ("host", True)):
        engine = engine_of({}, update)
        steps = []
        for step in range(4):
            steps += train_steps(engine, 1, first=step)
            if looks:
                engine.drain()
                engine.evaluate(global_batch(9))
        found.append((steps, digests(engine)))
    assert found[0] == found[1]


@pytest.mark.parametrize("update", UPDATES)
def test_a_resumed_run_has_the_curve_of_the_uninterrupted_one(update: str, tmp_path: Path) -> None:
    engine, resumed = engine_of({}, update), engine_of({}, "device")
    train_steps(engine, 3)
    engine.save(tmp_path)
    train_steps(resumed, 1)  # whose update in flight must not land on what is loaded
    assert resumed.load(tmp_path) == 3
    assert train_steps(resumed, 3, first=3) == train_steps(engine, 3, first=3)
    assert digests(resumed) == digests(engine)


def test_a_slow_thread_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step begins while the thread is in the middle of the chunks, whose counters it adds to."""
    found = []
    original = ChunkKernel.update

    def slow(*args: Any) -> None:
        time.sleep(0.01)
        original(*args)

    for kernel in (original, slow):
        monkeypatch.setattr(ChunkKernel, "update", kernel)
        engine = engine_of({}, "host")
        found.append((train_steps(engine, 4), digests(engine)))
    assert found[0] == found[1]


def test_an_error_of_the_thread_is_raised_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of({}, "host")

    def fail(*_: Any) -> None:
        raise RuntimeError("the host's kernel failed")

    monkeypatch.setattr(ChunkKernel, "update", fail)
    train_steps(engine, 1)
    with pytest.raises(RuntimeError, match="the host's kernel failed"):
        train_steps(engine, 1, first=1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without offload": ({"offload": {"delayed": True}}, "without offload.optimizer"),
    "float16": (late({"precision": {"preset": "fp16"}}, "host"), "offload.delayed with a loss scale"),
    "low moments": (late({"precision": {"optimizer_state": "bfloat16"}}, "host"), "'bfloat16' with offload.delayed"),
    "staging": (
        {"offload": {"optimizer": "cpu", "delayed": True, "staging_bytes": 2**20}},
        "with offload.staging_bytes",
    ),
    "experts": (late({"mesh": {"dp_shard": 2, "ep": 2}}, "host"), "mesh.ep > 1) with offload.delayed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_by_name(name: str) -> None:
    tables, words = REFUSED[name]
    sentences = [sentence for sentence, _ in not_executed_reasons(Plan.from_tables(tables))]
    assert [sentence for sentence in sentences if words in sentence], sentences


def test_a_refused_plan_builds_no_engine() -> None:
    with pytest.raises(NotBuiltError, match=r"offload\.delayed without offload\.optimizer"):
        build_engine("qwen3-tied", {"offload": {"delayed": True}})
