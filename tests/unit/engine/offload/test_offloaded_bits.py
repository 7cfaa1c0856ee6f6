"""Offloaded states on one rank: losses, norms, weights and moments have every bit of the same run without offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import digests, offloaded, small_chunks, trained
from samples import by_default
from tiny import build_engine, global_batch, train_steps

import weft.engine.updates as engine_updates
from weft.core.errors import NotBuiltError
from weft.engine.engine import Engine
from weft.engine.offload.chunk_kernel import ChunkKernel
from weft.engine.offload.updates import HostUpdate
from weft.engine.optim.clip import clip_factor
from weft.engine.optim.optimizers import OptimizerPolicy

UPDATES = ("device", "host")
BF16 = {"precision": {"preset": "bf16"}}
LOW: dict[str, Any] = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
LOWEST: dict[str, Any] = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": "bfloat16"}}
POLICIES: dict[str, tuple[dict[str, Any], OptimizerPolicy]] = {
    "adamw": ({"pipeline": {"microbatches": 4}, **BF16}, OptimizerPolicy()),
    "adamw, foreach": ({}, OptimizerPolicy(kernel="foreach")),
    "adam": ({"data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}, OptimizerPolicy(kind="adam")),
    "sgd with momentum": ({}, OptimizerPolicy(kind="sgd", learning_rate=1e-2)),
    "sgd": ({}, OptimizerPolicy(kind="sgd", learning_rate=1e-2, momentum=0.0)),
    "bfloat16 moments": ({**LOW, "data_parallel": {"zero": 3}}, OptimizerPolicy()),
    "bfloat16 weights and moments": (LOWEST, OptimizerPolicy()),
    "float16": ({"precision": {"preset": "fp16"}}, OptimizerPolicy()),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_bit_is_that_of_the_run_without_offload(name: str, update: str) -> None:
    plan, policy = POLICIES[name]
    expected = trained("qwen3-tied", plan, "", optimizer=policy)
    assert trained("qwen3-tied", plan, update, optimizer=policy) == expected


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("clip_norm", [0.0, 1e-3, 1e9])
def test_clipping_has_the_same_bits(update: str, clip_norm: float) -> None:
    expected = trained("qwen3-tied", {}, "", clip_norm=clip_norm)
    assert trained("qwen3-tied", {}, update, clip_norm=clip_norm) == expected


@pytest.mark.parametrize("update", UPDATES)
def test_frozen_parameters_have_no_states_and_do_not_move(update: str) -> None:
    frozen = ("model.layers.0.*", "model.embed_tokens.*")
    expected = trained("qwen3-tied", {}, "", frozen=frozen)
    found = trained("qwen3-tied", {}, update, frozen=frozen)
    assert found == expected
    assert not [key for key in found[1] if key.startswith("optim.model.layers.0.")]


@pytest.mark.parametrize("update", UPDATES)
def test_a_skipped_step_leaves_states_and_weights_untouched(update: str) -> None:
    with small_chunks():
        engine = build_engine("qwen3-tied", offloaded({"precision": {"preset": "fp16"}}, update))
    train_steps(engine, 1)
    before = digests(engine)
    engine.loss_scale.value = 2.0**120
    train_steps(engine, 1, first=1)
    assert digests(engine) == before


@pytest.mark.parametrize(("first", "second"), [("device", ""), ("", "host"), ("host", "device")])
def test_a_checkpoint_loads_with_and_without_offload(first: str, second: str, tmp_path: Path) -> None:
    plan = {"data_parallel": {"zero": 3}, **BF16}
    with small_chunks():
        writer, reader = (build_engine("qwen3-tied", offloaded(plan, update)) for update in (first, second))
    train_steps(writer, 2)
    writer.save(tmp_path)
    assert reader.load(tmp_path) == 2
    assert digests(reader) == digests(writer)
    assert train_steps(reader, 2, first=2) == train_steps(writer, 2, first=2)
    assert digests(reader) == digests(writer)


# --- planted bugs ----------------------------------------------------------------------------------------------------


def _twice(original: Callable[..., None]) -> Callable[..., None]:
    calls = 0

    def update(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        original(*args, **kwargs)
        calls += 1
        if calls == 2:
            original(*args, **kwargs)

    return update


@pytest.mark.parametrize("update", UPDATES)
def test_a_chunk_that_is_updated_twice_is_caught(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("qwen3-tied", {}, "", steps=2)
    monkeypatch.setattr(ChunkKernel, "update", _twice(ChunkKernel.update))
    assert trained("qwen3-tied", {}, update, steps=2) != expected


def test_a_stale_weight_that_returns_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostUpdate._update

    def stale(self: HostUpdate, update: Any, weights: list[torch.Tensor], *rest: Any) -> None:
        before = weights[0].clone()
        original(self, update, weights, *rest)
        weights[0].copy_(before)

    expected = trained("qwen3-tied", {}, "", steps=2)
    monkeypatch.setattr(HostUpdate, "_update", stale)
    assert trained("qwen3-tied", {}, "host", steps=2) != expected


def test_a_clip_factor_of_the_step_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("qwen3-tied", {}, "", clip_norm=0.1)
    factors = [torch.ones(())]

    def late(norm: torch.Tensor, bound: float) -> torch.Tensor:
        factors.append(clip_factor(norm, bound))
        return factors[-2]

    monkeypatch.setattr(engine_updates, "clip_factor", late)
    assert trained("qwen3-tied", {}, "device", clip_norm=0.1) != expected


# --- refusals --------------------------------------------------------------------------------------------------------


def test_optimizers_without_a_layout_of_states_are_refused_by_name() -> None:
    plan = offloaded({}, "device")
    with pytest.raises(NotBuiltError, match="RMSprop") as caught:
        build_engine("llama", plan, optimizer=lambda groups: torch.optim.RMSprop(groups))  # type: ignore[arg-type]
    assert "offload.optimizer" in caught.value.hint
    with pytest.raises(NotBuiltError, match="amsgrad"):
        build_engine("llama", plan, optimizer=lambda groups: torch.optim.AdamW(groups, amsgrad=True))  # type: ignore[arg-type]


def test_a_group_that_is_added_later_is_refused() -> None:
    engine = build_engine("qwen3-tied", offloaded({}, "host"))
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(NotBuiltError, match="a parameter group was added"):
        train_steps(engine, 1)


# --- chunks ahead of the update --------------------------------------------------------------------------------------


def ahead(plan: dict[str, Any], freed: list[int], *, staging_bytes: int = 0) -> tuple[Engine, list[int]]:
    """An engine that hides copies behind blocks; `freed`: the bytes that each block frees, used in rotation."""
    with small_chunks():
        engine = build_engine("qwen3-four", offloaded(plan, "device"))
    asked = [2**40]

    def allocated() -> int:
        asked.append(asked[-1] - freed[len(asked) % len(freed)])
        return asked[-1] + update.held_bytes

    assert engine.offload is not None
    update: Any = engine.offload._update
    blocks = [engine.model.get_submodule(name) for name in engine.layout.blocks]
    microbatches = engine.plan.pipeline.microbatches
    engine.offload.hide_behind(blocks, num_microbatches=microbatches, staging_bytes=staging_bytes, allocated=allocated)
    return engine, asked


AHEAD = [
    (freed, staging_bytes, microbatches)
    for microbatches in (1, 4)
    for freed, staging_bytes in [([0], 0), ([20000], 0), ([2**30], 60_000), ([0, 50000, -1000], 2**30), ([0], 60_000)]
]


@pytest.mark.parametrize(
    ("freed", "staging_bytes", "microbatches"), by_default([AHEAD[1], AHEAD[7], AHEAD[9]], AHEAD, extended=AHEAD[2:4])
)
def test_chunks_ahead_of_the_update_change_no_bit(freed: list[int], staging_bytes: int, microbatches: int) -> None:
    plan = {"pipeline": {"microbatches": microbatches}, "data_parallel": {"zero": 3}, **BF16}
    expected = trained("qwen3-four", plan, "", steps=4)
    engine, asked = ahead(plan, freed, staging_bytes=staging_bytes)
    found = train_steps(engine, 2)
    assert engine.evaluate(global_batch(7)).loss > 0
    found += train_steps(engine, 2, first=2)
    assert (found, digests(engine)) == expected
    assert len(asked) == 1 + 4 * 4  # after each block of the last micro-batch of each step


def test_a_skipped_step_forgets_what_was_loaded_ahead(tmp_path: Path) -> None:
    plan = {"precision": {"preset": "fp16"}}
    engines = [build_engine("qwen3-four", plan), ahead(plan, [2**30])[0]]
    found = []
    for engine in engines:
        train_steps(engine, 1)
        engine.loss_scale.value = 2.0**120
        train_steps(engine, 1, first=1)
        engine.loss_scale.value = 2.0**10
        found.append((train_steps(engine, 2, first=2), digests(engine)))
    assert found[0] == found[1]
    engines[0].save(tmp_path)
    assert engines[1].load(tmp_path) == 4  # states that were loaded ahead of a load would be stale
    again = [(train_steps(engine, 1, first=4), digests(engine)) for engine in engines]
    assert again[0] == again[1]


def test_staged_chunks_leave_in_the_first_half_of_a_step_and_come_in_the_second() -> None:
    staging_bytes = 60_000
    plan = {"pipeline": {"microbatches": 4}}
    engine, _ = ahead(plan, [0], staging_bytes=staging_bytes)
    assert engine.offload is not None
    update: Any = engine.offload._update
    held: list[tuple[int, int]] = []  # bytes that leave, bytes that were loaded, after each call of a block
    for name in engine.layout.blocks:

        def look(_module: Any, _args: Any) -> None:
            held.append((update.held_bytes - update._ahead_bytes, update._ahead_bytes))

        engine.model.get_submodule(name).register_forward_pre_hook(look)
    train_steps(engine, 1)
    held.clear()
    train_steps(engine, 1, first=1)
    leaving, coming = zip(*held, strict=True)
    assert max(sum(one) for one in held) <= staging_bytes
    assert leaving[0] > 0
    assert leaving == tuple(sorted(leaving, reverse=True))
    assert leaving[8:] == coming[:8] == (0,) * 8
    assert coming == tuple(sorted(coming))
    assert coming[-1] > 0
