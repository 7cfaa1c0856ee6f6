"""Offloaded inputs of recomputed blocks on a real GPU: bits, memory of the device, the pinned pool."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_engines import CUDA, engine_on
from tiny import global_batch

import weft.engine.activations.kept_inputs as kept_inputs
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining, dry_run
from weft.engine.activations.host_slots import pinned_bytes
from weft.engine.engine import Engine
from weft.engine.kernels.compiled import failures

pytestmark = [
    pytest.mark.gpu,
    # torch's own tracing asks non-leaf tensors for gradients, and hides that warning only where warnings are no errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # the compiler's own
]

MODEL: dict[str, Any] = {
    "type": "llama",
    "config": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    },
}  # fmt: skip
ROWS, LENGTH, WIDTH = 16, 4096, 256  # inputs are larger than gradients, so they decide where the peak is
RUN = RunSpec.from_tables({"model": MODEL, "data": {"sequence_length": LENGTH}, "train": {"global_batch": ROWS}})
INPUT_BYTES = ROWS * LENGTH * WIDTH * 2  # of a block, in bfloat16
NUM_BLOCKS = 8


def tables_of(offload: str, **more: Any) -> dict[str, Any]:
    activations = {"policy": "full", "offload": offload, **more.pop("activations", {})}
    return {"precision": {"preset": "bf16"}, **more, "activations": activations}


def bits(engine: Engine, steps: int = 4) -> list[torch.Tensor]:
    """Losses, gradients of every step and weights at the end."""
    found: list[torch.Tensor] = []
    engine.on_gradients = lambda named: found.extend(_local(value).clone() for value in named.values())
    for step in range(steps):
        found.append(torch.tensor(engine.step(global_batch(step)).loss))
    found += [_local(value).clone() for value in engine.model.parameters()]
    if dist.is_initialized():
        engine.close()
        dist.destroy_process_group()
    return found


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to_local() if hasattr(value, "to_local") else value.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"pipeline": {"microbatches": 4}, "data_parallel": {"zero": 3}}),
        ("gpt2-four", {"pipeline": {"microbatches": 2}}),
        ("mixtral", {"pipeline": {"microbatches": 2}, "data_parallel": {"zero": 2}}),
        ("llama", {"activations": {"policy": "budget", "mixture": [3, 1]}}),
        ("llama", {"compile": {"enabled": True}, "kernels": {"loss": "fused"}, "data_parallel": {"zero": 2}}),
        ("llama", {"compile": {"enabled": True}, "pipeline": {"microbatches": 4}}),
    ],
)
def test_it_has_the_bits_of_plain_recompute(family: str, more: dict[str, Any]) -> None:
    plain = bits(engine_on(CUDA, family, tables_of("none", **more)))
    away = bits(engine_on(CUDA, family, tables_of("cpu", **more)))
    assert len(plain) == len(away)
    assert all(torch.equal(expected, found) for expected, found in zip(plain, away, strict=True))


class Trained:
    """A model large enough that copies and kernels overlap, on random tokens."""

    def __init__(self, offload: str, **more: Any) -> None:
        self.stage = FakeTraining(RUN, Plan.from_tables(tables_of(offload, **more)), device=CUDA)
        self.stage.build()
        generator = torch.Generator(device=CUDA).manual_seed(3)
        self.tokens = torch.randint(0, 256, (ROWS, LENGTH + 1), device=CUDA, generator=generator)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.normal_(0.0, 0.02, generator=generator)

    @property
    def engine(self) -> Engine:
        return self.stage.engine

    def step(self) -> torch.Tensor:
        batch = {"input_ids": self.tokens[:, :-1].contiguous(), "labels": self.tokens[:, 1:].contiguous()}
        return self.engine.step_nowait(batch).values[0]

    def close(self) -> None:
        self.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def losses_and_peak(offload: str, **more: Any) -> tuple[list[float], int, list[int]]:
    """Losses of steps that are issued without waiting, the peak of later steps, and the pool's bytes after each."""
    trained = Trained(offload, **more)
    pool, values = [], []
    for step in range(8):
        if step == 3:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        values.append(trained.step())
        pool.append(trained.engine.inputs.slots.nbytes)
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    assert failures(trained.engine.model) == []
    found = torch.stack(values).tolist()
    trained.close()
    del trained
    gc.collect()
    torch.cuda.empty_cache()
    return found, peak_bytes, pool


@pytest.mark.parametrize(
    "more",
    [{}, {"compile": {"enabled": True}, "kernels": {"loss": "fused"}}, {"data_parallel": {"zero": 3}}],
    ids=["eager", "compiled", "ZeRO-3"],
)
def test_the_device_is_without_the_inputs(more: dict[str, Any]) -> None:
    """Two inputs are on the device at a time; the pool has one slot per block and never grows."""
    plain, plain_bytes, _ = losses_and_peak("none", **more)
    away, away_bytes, pool = losses_and_peak("cpu", **more)
    assert away == plain
    saved_bytes = plain_bytes - away_bytes
    assert (NUM_BLOCKS - 3) * INPUT_BYTES <= saved_bytes <= NUM_BLOCKS * INPUT_BYTES
    assert pool == [NUM_BLOCKS * INPUT_BYTES] * len(pool)


def test_several_micro_batches_share_the_slots() -> None:
    """Four micro-batches of a quarter of the rows: slots are a quarter as large, and reused within a step."""
    plain, *_ = losses_and_peak("none", pipeline={"microbatches": 4})
    away, _, pool = losses_and_peak("cpu", pipeline={"microbatches": 4})
    assert away == plain
    assert pool == [NUM_BLOCKS * INPUT_BYTES // 4] * len(pool)


def test_the_dry_run_is_the_allocators_peak() -> None:
    plan = Plan.from_tables(tables_of("cpu"))
    predicted = dry_run(RUN, plan)
    _, peak_bytes, _ = losses_and_peak("cpu")
    assert predicted.peak_bytes == pytest.approx(peak_bytes, rel=0.01)


def test_pinned_memory_has_the_exact_size_and_is_freed() -> None:
    memory = pinned_bytes(3 * 2**20 + 512)
    assert memory.is_pinned()
    assert memory.numel() == 3 * 2**20 + 512
    device = torch.arange(1000, device=CUDA, dtype=torch.float32)
    memory[:4000].view(torch.float32).copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory[:4000].view(torch.float32), device.cpu())
    del memory
    gc.collect()
    assert pinned_bytes(2**20).is_pinned()


def test_slots_are_pinned_after_the_first_step() -> None:
    trained = Trained("cpu")
    trained.step()
    inputs = trained.engine.inputs
    assert inputs.is_on
    assert all(slot.memory.is_pinned() and not slot.is_ordinary for slot in inputs.slots.all_slots())
    assert len({slot.memory.untyped_storage().data_ptr() for slot in inputs.slots.all_slots()}) == 1
    trained.close()


class _Impatient(kept_inputs.HostLink):
    """Does not wait for copies: what a missing event would look like, made certain by a slow stream."""

    def bring(self, slot: Any, target: torch.Tensor) -> None:
        with torch.cuda.stream(self._back):
            torch.cuda._sleep(200_000_000)
        super().bring(slot, target)

    def wait(self, event: Any) -> None:
        pass


def test_a_missing_wait_is_noticed() -> None:
    """The planted bug is one that only a GPU has: the computation reads an input before its copy is done."""
    found = []
    for link in (kept_inputs.HostLink, _Impatient):
        trained = Trained("cpu")
        inputs = trained.engine.inputs
        assert inputs.is_on
        inputs._link = link(CUDA)
        norms = []
        trained.engine.on_gradients = lambda named, norms=norms: norms.append(
            torch.stack([_local(value).float().norm() for value in named.values()])
        )
        for _ in range(2):
            trained.step()
        torch.cuda.synchronize()
        found.append(norms[-1])
        trained.close()
    assert not torch.equal(*found)
