"""Masters and weights on the host, on a real GPU: bits, memory, a model that does not fit, checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engines import CUDA
from offloaded import digests, offloaded, trained
from tiny import global_batch
from torch import nn
from torch.nn.attention import SDPBackend

from weft.core import offload_sizes
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining
from weft.engine.engine import Engine
from weft.engine.kernels.attention import prefer_kernels
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
    free()


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("what", ["masters", "weights"])
@pytest.mark.parametrize(
    "plan",
    [
        {**BF16, "pipeline": {"microbatches": 4}},
        {**BF16, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}},
        {**BF16, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
        {**BF16, "precision": {"preset": "bf16", "optimizer_state": "bfloat16"}},
    ],
    ids=["one device", "ZeRO-2", "ZeRO-3, recomputed", "bfloat16 moments"],
)
def test_the_device_update_has_the_bits_of_the_run_without_offload(plan: dict[str, Any], what: str) -> None:
    assert trained("llama", plan, f"device, {what}", device=CUDA) == trained("llama", plan, "", device=CUDA)


@pytest.mark.parametrize("what", ["masters", "weights"])
def test_the_host_update_has_the_bits_of_masters_on_the_device(what: str) -> None:
    expected = trained("llama", BF16, "host", device=CUDA)
    assert trained("llama", BF16, f"host, {what}", device=CUDA) == expected


def large(update: str) -> Engine:
    torch.manual_seed(0)
    stage = FakeTraining(RUN, Plan.from_tables(offloaded(BF16, update)), device=CUDA)
    stage.build()
    engine, generator = stage.engine, torch.Generator().manual_seed(1)

    def write(values: torch.Tensor) -> None:
        values.copy_(torch.empty(values.shape).normal_(0.0, 0.02, generator=generator))

    for parameter in engine.parameters:
        if engine.offload is not None:
            engine.offload.store_weight(parameter, write)
        else:
            with torch.no_grad():
                write(local(parameter))
    return engine


def batch(step: int) -> dict[str, torch.Tensor]:
    return global_batch(step, rows=4, length=512)


@pytest.mark.parametrize("update", ["device, masters", "device, weights"])
def test_steps_without_waiting_in_many_chunks_have_the_same_bits(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is ahead of the device by several steps: no copy of a state or of a unit may overtake another."""
    monkeypatch.setattr(offload_sizes, "CHUNK_ELEMENTS", 1 << 21)
    found = []
    for place in ("", update):
        engine = large(place)
        losses = [one.resolve()[0].loss for one in [engine.step_nowait(batch(step)) for step in range(6)]]
        losses.append(engine.evaluate(batch(9)).loss)
        losses += [one.resolve()[0].loss for one in [engine.step_nowait(batch(step)) for step in range(6, 8)]]
        found.append((losses, digests(engine)))
        engine.close()
        del engine
        free()
    assert found[0] == found[1]


def test_memory_falls_by_masters_and_by_weights() -> None:
    at_rest, peaks = {}, {}
    for update in ("device", "device, masters", "device, weights"):
        engine = large(update)
        for step in range(2):
            engine.step(batch(step))
        free()
        torch.cuda.reset_peak_memory_stats()
        for step in range(2):
            engine.step(batch(step))
        peaks[update] = torch.cuda.max_memory_allocated()
        engine.state()  # chunks that leave after the update are gone then
        free()
        at_rest[update] = torch.cuda.memory_allocated()
        num_parameters = sum(local(parameter).numel() for parameter in engine.parameters)
        engine.close()
        del engine
        free()
    assert at_rest["device"] - at_rest["device, masters"] == pytest.approx(2 * num_parameters, rel=0.01)
    assert at_rest["device, masters"] - at_rest["device, weights"] == pytest.approx(2 * num_parameters, rel=0.01)
    assert peaks["device, weights"] < peaks["device, masters"] < peaks["device"]


def test_a_model_larger_than_the_memory_trains() -> None:
    """Within a budget in which the same run without offload ends for lack of memory."""
    free()
    torch.cuda.reset_peak_memory_stats()
    engine = large("device, weights")
    expected = [engine.step(batch(step)).loss for step in range(3)]
    budget_bytes = int(1.1 * torch.cuda.max_memory_reserved())
    engine.close()
    del engine
    free()
    torch.cuda.set_per_process_memory_fraction(budget_bytes / torch.cuda.get_device_properties(CUDA).total_memory)
    try:
        engine = large("device, weights")
        assert [engine.step(batch(step)).loss for step in range(3)] == expected
        engine.close()
        del engine
        free()
        with pytest.raises(torch.OutOfMemoryError):
            _train_plain()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _train_plain() -> None:
    engine = large("")
    try:
        for step in range(2):
            engine.step(batch(step))
    finally:
        engine.close()


def test_masters_and_weights_are_page_locked() -> None:
    engine = large("device, weights")
    assert engine.offload is not None
    held: list[torch.Tensor] = [*engine.masters.values(), *engine.offload.homes.values()]
    assert held
    assert all(one.is_pinned() for one in held)
    assert all(_storage_bytes(parameter) == 0 for parameter in engine.model.parameters())


def _storage_bytes(parameter: nn.Parameter) -> int:
    return local(parameter.detach()).untyped_storage().nbytes()


def test_a_checkpoint_crosses_between_device_and_host(tmp_path: Path) -> None:
    writer = large("device, weights")
    for step in range(2):
        writer.step(batch(step))
    writer.save(tmp_path)
    reader = large("")
    assert reader.load(tmp_path) == 2
    assert digests(reader) == digests(writer)
    assert reader.step(batch(2)).loss == writer.step(batch(2)).loss
    assert digests(reader) == digests(writer)
