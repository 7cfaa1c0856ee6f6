"""Saved tensors of further blocks on the host, on a real GPU: bits, memory of the device, the pinned pool."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_engines import CUDA, engine_on
from tiny import global_batch

import weft.engine.activations.kept_tensors as kept_tensors
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining, dry_run
from weft.engine.activations.host_link import HostLink
from weft.engine.engine import Engine
from weft.engine.kernels.compiled import failures
from weft.plan.ask import estimate_plan

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
ROWS, LENGTH = 16, 4096
RUN = RunSpec.from_tables({"model": MODEL, "data": {"sequence_length": LENGTH}, "train": {"global_batch": ROWS}})
NUM_AWAY = 6


def tables_of(number: int, **more: Any) -> dict[str, Any]:
    offload = {"offload": "cpu", "offload_blocks": number} if number else {}
    return {"precision": {"preset": "bf16"}, **more, "activations": {**more.pop("activations", {}), **offload}}


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
    ("family", "number", "more"),
    [
        ("llama", 6, {}),
        ("llama", 4, {"pipeline": {"microbatches": 4}, "data_parallel": {"zero": 3}}),
        ("gpt2-four", 3, {"pipeline": {"microbatches": 2}}),
        ("mixtral", 2, {"pipeline": {"microbatches": 2}, "data_parallel": {"zero": 2}}),
        ("llama", 2, {"activations": {"policy": "budget", "mixture": [2, 1]}}),
        ("llama", 4, {"compile": {"enabled": True}, "kernels": {"loss": "fused"}, "data_parallel": {"zero": 2}}),
    ],
)
def test_it_has_the_bits_of_the_run_without(
    family: str, number: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_tensors, "LEAST_BYTES", 1)
    plain = bits(engine_on(CUDA, family, tables_of(0, **more)))
    away = bits(engine_on(CUDA, family, tables_of(number, **more)))
    assert len(plain) == len(away)
    assert all(torch.equal(expected, found) for expected, found in zip(plain, away, strict=True))


class Trained:
    """A model large enough that copies and kernels overlap, on random tokens."""

    def __init__(self, number: int, **more: Any) -> None:
        self.stage = FakeTraining(RUN, Plan.from_tables(tables_of(number, **more)), device=CUDA)
        self.stage.build()
        generator = torch.Generator(device=CUDA).manual_seed(3)
        self.tokens = torch.randint(0, 256, (ROWS, LENGTH + 1), device=CUDA, generator=generator)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                _local(parameter).normal_(0.0, 0.02, generator=generator)

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


def losses_and_peak(number: int, **more: Any) -> tuple[list[float], int, list[int]]:
    """Losses of steps that are issued without waiting, the peak of later steps, and the pool's bytes after each."""
    trained = Trained(number, **more)
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
def test_the_device_is_without_the_tensors(more: dict[str, Any]) -> None:
    """Of six blocks at most two are on the device; the pool is the six blocks' and never grows."""
    plain, plain_bytes, _ = losses_and_peak(0, **more)
    away, away_bytes, pool = losses_and_peak(NUM_AWAY, **more)
    assert away == plain
    per_block = pool[-1] / NUM_AWAY
    assert plain_bytes - away_bytes >= (NUM_AWAY - 3) * per_block
    assert len(set(pool)) == 1


def test_several_micro_batches_share_the_slots() -> None:
    *_, whole = losses_and_peak(NUM_AWAY)
    plain, *_ = losses_and_peak(0, pipeline={"microbatches": 4})
    away, _, pool = losses_and_peak(NUM_AWAY, pipeline={"microbatches": 4})
    assert away == plain
    assert len(set(pool)) == 1
    assert pool[0] == pytest.approx(whole[0] / 4, rel=0.05)


def test_dry_run_and_planner_know_the_peak_and_the_pool() -> None:
    plan = Plan.from_tables(tables_of(NUM_AWAY))
    predicted, estimated = dry_run(RUN, plan), estimate_plan(RUN, plan, "1xH200")
    _, peak_bytes, pool = losses_and_peak(NUM_AWAY)
    assert predicted.peak_bytes == pytest.approx(peak_bytes, rel=0.02)
    assert predicted.host_terms["activations"] == pytest.approx(pool[-1], rel=0.02)
    assert estimated.offload.host_terms["activations"] == pytest.approx(pool[-1], rel=0.02)


def test_slots_are_pinned_after_the_first_step() -> None:
    trained = Trained(NUM_AWAY)
    trained.step()
    slots = trained.engine.inputs.slots.all_slots()
    assert slots
    assert all(slot.memory.is_pinned() and not slot.is_ordinary for slot in slots)
    assert len({slot.memory.untyped_storage().data_ptr() for slot in slots}) == 1
    trained.close()


class _Impatient(HostLink):
    """Does not wait for copies: what a missing event would look like, made certain by a slow stream."""

    def bring(self, slot: Any, target: torch.Tensor) -> None:
        with torch.cuda.stream(self._back):
            torch.cuda._sleep(200_000_000)
        super().bring(slot, target)

    def wait(self, event: Any) -> None:
        pass


def test_a_missing_wait_is_noticed() -> None:
    """The planted bug is one that only a GPU has: the computation reads a tensor before its copy is done."""
    found = []
    for link in (HostLink, _Impatient):
        trained = Trained(NUM_AWAY)
        tensors = trained.engine.inputs.tensors
        assert tensors is not None
        tensors._link = link(CUDA)
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
