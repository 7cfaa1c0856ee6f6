"""Optimizer offload on a real GPU: bits against moments on the device, memory, the pinned slab, checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engines import CUDA
from offloaded import digests, offloaded, small_chunks, trained
from tiny import build_engine, global_batch
from torch.nn.attention import SDPBackend

from weft.core import offload_sizes
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining
from weft.engine.engine import Engine
from weft.engine.kernels.attention import prefer_kernels
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.ownership import local

pytestmark = pytest.mark.gpu

BF16: dict[str, Any] = {"precision": {"preset": "bf16"}, "kernels": {"attention": "torch"}}
MODEL: dict[str, Any] = {
    "type": "llama",
    "config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
}  # fmt: skip
RUN = RunSpec.from_tables({"model": MODEL, "data": {"sequence_length": 512}, "train": {"global_batch": 4}})


@pytest.fixture(autouse=True)
def _repeatable_kernels() -> Iterator[None]:
    """Fused attention sums in the order in which its blocks finish: two right runs would differ."""
    with prefer_kernels(SDPBackend.MATH):
        yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("plan", [{**BF16, "pipeline": {"microbatches": 4}}, {**BF16, "data_parallel": {"zero": 3}}])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_the_device_update_has_the_bits_of_the_run_without_offload(kind: str, plan: dict[str, Any]) -> None:
    policy = OptimizerPolicy(kind=kind, learning_rate=3e-4)  # type: ignore[arg-type]
    expected = trained("llama", plan, "", device=CUDA, optimizer=policy)
    assert trained("llama", plan, "device", device=CUDA, optimizer=policy) == expected


def test_bfloat16_moments_round_alike() -> None:
    plan = {**BF16, "precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
    assert trained("llama", plan, "device", device=CUDA) == trained("llama", plan, "", device=CUDA)


def large(update: str, *, zero: int = 0, microbatches: int = 1, offload: dict[str, Any] | None = None) -> Engine:
    """`offload`: the section of the plan, instead of `update`."""
    torch.manual_seed(0)
    tables = {**BF16, "data_parallel": {"zero": zero}, "pipeline": {"microbatches": microbatches}}
    plan = Plan.from_tables({**offloaded(tables, update), **({"offload": offload} if offload else {})})
    stage = FakeTraining(RUN, plan, device=CUDA)
    stage.build()
    generator = torch.Generator(CUDA).manual_seed(1)
    with torch.no_grad():
        for parameter in stage.engine.parameters:
            local(parameter).normal_(0.0, 0.02, generator=generator)
    return stage.engine


def batch(step: int) -> dict[str, torch.Tensor]:
    return global_batch(step, rows=4, length=512)


@pytest.mark.parametrize("zero", [0, 2])
def test_large_tensors_in_many_chunks_have_the_same_bits(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernel with clipping inside, and matrices in several pieces."""
    monkeypatch.setattr(offload_sizes, "CHUNK_ELEMENTS", 1 << 21)
    found = []
    for update in ("", "device"):
        engine = large(update, zero=zero)
        assert isinstance(engine.optimizer, AdamWLow)
        records = [engine.step(batch(step)) for step in range(4)]
        found.append(([(record.loss, record.grad_norm) for record in records], digests(engine)))
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(("microbatches", "staging_bytes"), [(1, 0), (4, 0), (4, 10**8), (4, 10**9)])
def test_steps_without_waiting_have_the_same_bits(
    microbatches: int, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is ahead of the device by several steps: no copy may overtake another."""
    monkeypatch.setattr(offload_sizes, "CHUNK_ELEMENTS", 1 << 21)
    found = []
    for update in ("", "device"):
        offload = {"optimizer": "cpu", "update": update, "staging_bytes": staging_bytes} if update else None
        engine = large(update, microbatches=microbatches, offload=offload)
        pending = [engine.step_nowait(batch(step)) for step in range(6)]
        losses = [one.resolve()[0].loss for one in pending]
        found.append((losses, digests(engine)))
        engine.close()
    assert found[0] == found[1]


def test_the_host_update_has_the_bits_of_the_optimizer_on_a_cpu() -> None:
    """One update of the same weights by the same gradients."""
    with small_chunks():
        engine = build_engine("llama", offloaded(BF16, "host"), device=CUDA, clip_norm=0.0)
    assert all(state["exp_avg"].is_pinned() for state in engine.optimizer.state.values())
    plain = {name: value.detach().cpu().clone().requires_grad_() for name, value in engine.trained.items()}
    groups = [
        {"params": [plain[name] for name, value in plain.items() if (value.ndim >= 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    reference = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def take(gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            plain[name].grad = gradient.detach().cpu().clone()

    engine.on_gradients = take
    for step in range(3):
        engine.step(global_batch(step))
        reference.step()
        pairs = ((name, value.detach().cpu(), plain[name]) for name, value in engine.trained.items())
        assert [name for name, ours, theirs in pairs if not torch.equal(ours, theirs)] == []


@pytest.mark.parametrize("update", ["device", "host"])
def test_memory_falls_by_the_moments(update: str) -> None:
    peaks = []
    for place in ("", update):
        engine = large(place)
        for step in range(2):
            engine.step(batch(step))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for step in range(2):
            engine.step(batch(step))
        moments = sum(2 * parameter.nbytes for parameter in engine.parameters)
        peak = torch.cuda.max_memory_allocated()
        engine.state()  # chunks that leave after the update are gone then
        peaks.append((peak, torch.cuda.memory_allocated()))
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert peaks[0][1] - peaks[1][1] == pytest.approx(moments, rel=0.01)
    assert peaks[0][0] - peaks[1][0] == pytest.approx(moments, rel=0.02)


def with_staging(staging_bytes: int) -> tuple[list[float], dict[str, str], int]:
    """Losses of steps without a wait between them, digests at the end, and the peak of the later steps."""
    offload = {"optimizer": "cpu", "update": "device", "chunk_elements": 1 << 19, "staging_bytes": staging_bytes}
    engine = large("", microbatches=4, offload=offload)
    pending = [engine.step_nowait(batch(step)) for step in range(3)]
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    pending += [engine.step_nowait(batch(step)) for step in range(3, 6)]
    losses = [one.resolve()[0].loss for one in pending]
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    found = losses, digests(engine), peak_bytes
    engine.close()
    return found


def test_staging_has_the_same_bits_and_takes_no_more_than_it_may() -> None:
    staging_bytes = 2**26
    (plain, bits, plain_bytes), (staged, staged_bits, staged_peak) = (with_staging(size) for size in (0, staging_bytes))
    assert staged == plain
    assert staged_bits == bits
    assert staged_peak <= plain_bytes + staging_bytes + 2**22


def test_a_checkpoint_crosses_between_device_and_host(tmp_path: Path) -> None:
    writer, reader = large("device", zero=2), large("", zero=2)
    for step in range(2):
        writer.step(batch(step))
    writer.save(tmp_path)
    assert reader.load(tmp_path) == 2
    assert digests(reader) == digests(writer)
    assert reader.step(batch(2)).loss == writer.step(batch(2)).loss
    assert digests(reader) == digests(writer)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("update", ["device", "host"])
def test_delayed_updates_land_the_bits_of_updates_in_place(update: str, kind: str) -> None:
    """Drained after every step, a delayed run on the device is the run without offload; steps without waiting and
    evaluations between them change no bit: no copy overtakes another."""
    policy = OptimizerPolicy(kind=kind, learning_rate=1e-3)  # type: ignore[arg-type]
    plan = {**offloaded({**BF16, "data_parallel": {"zero": 2}}, update)}
    plan["offload"] = {**plan["offload"], "delayed": True}
    with small_chunks():
        plain, drained, waits, runs = (
            build_engine("llama", tables, device=CUDA, optimizer=policy)
            for tables in ({**BF16, "data_parallel": {"zero": 2}}, plan, plan, plan)
        )
    for step in range(4):
        drained.step(global_batch(step))
        plain.step(global_batch(step))
        if update == "device":
            assert digests(drained) == digests(plain)
        drained.state()
    losses = []
    for step in range(6):
        losses.append(waits.step(global_batch(step)).loss)
        torch.cuda.synchronize()
        waits.evaluate(global_batch(9))
    pending = [runs.step_nowait(global_batch(step)) for step in range(6)]
    assert [one.resolve()[0].loss for one in pending] == losses
    assert digests(runs) == digests(waits)
