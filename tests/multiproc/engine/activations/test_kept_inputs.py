"""Offloaded and partitioned inputs of recomputed blocks on several ranks: the bits of plain recompute in any layout."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, global_batch

import weft.engine.activations.kept_tensors as kept_tensors
from weft.engine.activations.input_partition import InputPartition
from weft.engine.activations.kept_inputs import KeptInputs
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter

Tables = dict[str, Any]
STEPS, MICROBATCHES = 2, 2
OFFLOAD, PARTITION = {"offload": "cpu"}, {"partition": True}
BOTH = {**OFFLOAD, **PARTITION}


def plan(mesh: Tables, *, zero: int = 0, stream: bool = True, **tables: Any) -> Tables:
    return {
        "mesh": mesh,
        "data_parallel": {"zero": zero},
        "tensor_parallel": {"sequence_parallel": stream},
        "pipeline": {"microbatches": MICROBATCHES},
        **tables,
    }


def digest(engine: Engine) -> tuple[list[float], str]:
    """Losses, and a digest of all gradients and weights, of a few steps."""
    found = hashlib.sha256()

    def look(named: dict[str, torch.Tensor]) -> None:
        for gradient in named.values():
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            found.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())

    engine.on_gradients = look
    losses = [engine.step(engine.share_of(global_batch(step))).loss for step in range(STEPS)]
    engine.drain()
    look(dict(engine.model.named_parameters()))
    return losses, found.hexdigest()


def plain_and_kept(_rank: int, _world: int, family: str, tables: Tables, kept: Tables) -> list[Any]:
    found = []
    for activations in ({"policy": "full"}, {"policy": "full", **kept}):
        engine = build_engine(family, {**tables, "activations": activations})
        found.append(digest(engine))
        if engine.inputs.is_on:
            found.append((engine.inputs.num_kept, len(engine.layout.blocks)))
        engine.close()
    return found


def staged(schedule: str, **mesh: int) -> Tables:
    return plan({"pp": 2, **mesh}, stream=False, pipeline={"microbatches": MICROBATCHES, "schedule": schedule})


Layout = tuple[int, str, Tables, Tables]  # ranks, family, plan, keys of [activations]
LAYOUTS: dict[str, Layout] = {
    "ZeRO-3": (2, "mixtral", plan({"dp_shard": 2}, zero=3), OFFLOAD),
    "tp, sequence parallel": (2, "llama", plan({"tp": 2}), OFFLOAD),
    "partition": (2, "llama", plan({"tp": 2}, stream=False), PARTITION),
    "partition, dropout, offload": (2, "gpt2", plan({"tp": 2}, stream=False), BOTH),
    "1f1b, dropout": (2, "gpt2-four", staged("1f1b"), OFFLOAD),
    "pipedream": (2, "llama", staged("pipedream"), OFFLOAD),
}
MORE: dict[str, Layout] = {
    "DDP, dropout": (2, "gpt2", plan({"dp_replicate": 2}), OFFLOAD),
    "ZeRO-1": (2, "llama", plan({"dp_shard": 2}, zero=1), OFFLOAD),
    "experts": (2, "mixtral", plan({"tp": 2, "ep": 2}), OFFLOAD),
    "partition, experts, offload": (2, "mixtral", plan({"tp": 2, "ep": 2}, stream=False), BOTH),
    "zero bubble": (2, "qwen3-four", staged("zero_bubble"), OFFLOAD),
    "interleaved": (2, "qwen3-four", staged("interleaved_1f1b"), OFFLOAD),
    "pipeline x partition": (4, "qwen3-four", staged("1f1b", tp=2), BOTH),
}
MORE["interleaved"][2]["pipeline"]["virtual_stages"] = 2


@pytest.mark.parametrize("layout", by_default(["partition"], [*LAYOUTS, *MORE], extended=LAYOUTS))
def test_the_bits_are_those_of_plain_recompute(layout: str) -> None:
    num_ranks, family, tables, kept = {**LAYOUTS, **MORE}[layout]
    results = run_ranks(plain_and_kept, num_ranks, family, tables, kept, timeout_s=120)
    for plain, found, (num_kept, num_blocks) in results:
        assert found == plain
        assert num_kept == STEPS * MICROBATCHES * num_blocks


# --- the partition -------------------------------------------------------------------------------------------------


def shares(_rank: int, world: int) -> list[tuple[bool, int, int]]:
    """(values are back, bytes kept, bytes of the input) for even and uneven sizes."""
    import torch.distributed as dist

    found = []
    for size in ((4, 6), (5, 3), (1,)):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(7))
        for offloads in (False, True):
            kept = KeptInputs(device=torch.device("cpu"), offloads=offloads, group=dist.group.WORLD)
            inputs = kept.of_block([tensor], {})
            inputs.take()
            kept.after_block(inputs)
            share = kept.device_tensors()[0]
            (again,), _ = inputs.take()
            found.append((torch.equal(again, tensor), share.untyped_storage().nbytes(), tensor.nbytes))
    return found


@pytest.mark.parametrize("degree", [2, 3])
def test_a_rank_keeps_its_share_and_no_more(degree: int) -> None:
    for found in run_ranks(shares, degree):
        for is_back, kept_bytes, nbytes in found:
            assert is_back
            assert kept_bytes == 4 * -(-(nbytes // 4) // degree)


def gathered_traffic(_rank: int, _world: int, kept: Tables) -> list[Tables]:
    tables = plan({"tp": 2}, stream=False, activations={"policy": "full", **kept})
    engine = build_engine("llama", tables)
    meter = StepMeter(engine)
    with meter.measuring():
        meter.next_step()
        engine.step(global_batch(0))
    return [row for row in meter.traffic if row["collective"] == "all_gather" and row["axis"] == "tp"]


def test_a_block_is_gathered_once_per_micro_batch_in_the_backward() -> None:
    """6 blocks, and no row for the forward."""
    for kept in (PARTITION, BOTH):
        for rows in run_ranks(gathered_traffic, 2, kept):
            (row,) = [row for row in rows if row["phase"] == "backward"]
            assert row["count"] == 6 * MICROBATCHES


# --- planted bugs --------------------------------------------------------------------------------------------------


class _SharesOfNeighbours(InputPartition):
    """Each rank keeps the share of the next one."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._rank = (self._rank + 1) % self._degree


def with_wrong_shares(_rank: int, _world: int) -> bool:
    tables = plan({"tp": 2}, stream=False, activations={"policy": "full", **PARTITION})
    right, wrong = build_engine("llama", tables), build_engine("llama", tables)
    assert wrong.inputs._partition is not None
    wrong.inputs._partition = _SharesOfNeighbours(wrong.inputs._partition._group)
    return digest(right)[1] == digest(wrong)[1]


@pytest.mark.extended
def test_shares_of_another_rank_are_noticed() -> None:
    assert run_ranks(with_wrong_shares, 2) == [False, False]


def kept_tensors_of_blocks(_rank: int, _world: int, family: str, tables: Tables) -> list[Any]:
    kept_tensors.LEAST_BYTES = 1
    found = []
    for activations in ({}, {**OFFLOAD, "offload_blocks": 2}):
        engine = build_engine(family, {**tables, "activations": activations})
        found.append(digest(engine))
        if engine.inputs.tensors is not None:
            found.append(engine.inputs.tensors.num_kept)
        engine.close()
    return found


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["ZeRO-3", "tp, sequence parallel", "DDP, dropout", "experts"])
def test_saved_tensors_of_further_blocks_have_the_same_bits(layout: str) -> None:
    num_ranks, family, tables, _ = {**LAYOUTS, **MORE}[layout]
    for plain, away, num_kept in run_ranks(kept_tensors_of_blocks, num_ranks, family, tables, timeout_s=120):
        assert away == plain
        assert num_kept > 0
