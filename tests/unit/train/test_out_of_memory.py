"""Out of memory as a sentence: where, what was asked for, what there is, what filled it, and what would fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, build_engine, global_batch
from torch import nn

from weft.core.errors import MemoryLimitError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.build import build_config
from weft.train.out_of_memory import OutOfMemoryScene, explained
from weft.train.ranks.environment import Process
from weft.train.ranks.failures import phase, phase_of, record_failure

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB of which 512.00 MiB is free."
)
HOST = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error code 12"
)


def scene_of(**known: Any) -> OutOfMemoryScene:
    run = RunSpec.from_tables(
        {
            "model": FAMILIES["llama"].model_dump(exclude_none=True),
            "data": {"sequence_length": 16},
            "train": {"global_batch": 16},
        }
    )
    config = build_config(FAMILIES["llama"], vocab_size=257)
    return OutOfMemoryScene(run=run, plan=Plan(), device=torch.device("cpu"), config=config, **known)


def fail(module: nn.Module, error: Exception) -> None:
    def forward(*_: object, **__: object) -> None:
        raise error

    module.forward = forward  # type: ignore[method-assign]


def test_the_sentence_of_a_step() -> None:
    engine = build_engine("llama")
    engine.step(global_batch(0))
    fail(engine.model.get_submodule("model.layers.3.mlp"), torch.OutOfMemoryError(CUDA))
    with pytest.raises(MemoryLimitError) as caught, explained(scene_of(engine=engine)), phase("step 2"):
        engine.step(global_batch(1))
    told = caught.value
    assert (told.code, told.exit_code, phase_of(told)) == ("W703", 3, "step 2")
    assert told.message.startswith("out of memory in step 2, forward of model.layers.3.mlp; 2.0 GiB were requested")
    assert "512.0 MiB of it free" in told.message
    assert "it held optimizer state" in told.message
    assert "weights" in told.message
    assert "\n" not in told.message
    assert told.hint.startswith("the smallest change that would fit: ")


def test_the_rank_is_named_once() -> None:
    error = MemoryLimitError("out of memory in step 2, forward of x; 1 B were requested")
    with pytest.raises(MemoryLimitError), phase("step 2"):
        raise error
    record = record_failure(error, process=Process(rank=1, local_rank=1, world_size=2, restart_count=0))
    assert record.to_error().message == "rank 1 ran out of memory in step 2, forward of x; 1 B were requested"


def test_building_and_the_host_s_allocator() -> None:
    with pytest.raises(MemoryLimitError) as caught, explained(scene_of()), phase("building the model"):
        raise RuntimeError(HOST)
    assert caught.value.message.startswith(
        "out of memory in building the model; 3.0 GiB were requested; the device has"
    )


def test_evaluation() -> None:
    engine = build_engine("llama")
    fail(engine.model.get_submodule("lm_head"), torch.OutOfMemoryError(CUDA))
    scene = scene_of(engine=engine)
    with pytest.raises(MemoryLimitError, match="in evaluation, forward"), explained(scene), phase("evaluation"):
        engine.evaluate(global_batch(0))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), explained(scene_of()):
        raise ZeroDivisionError


def test_without_a_planner_the_hint_is_general(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of()
    scene.config = None  # failed before there was one
    with pytest.raises(MemoryLimitError) as caught, explained(scene):
        raise MemoryError
    assert "micro-batches" in caught.value.hint
