"""Every synchronous schedule has the gradients of one process, bit by bit: a schedule is only an order.

Composed with data and tensor parallelism, a pipeline has the curve of one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, global_batch, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL, SAME_STEP_REL
from torch._dynamo.utils import counters

import weft.engine.kernels.compiled as compiled
import weft.engine.kernels.head_loss as head_loss
from weft.engine.kernels.fast_path import fast_path
from weft.engine.pp.runtime import PipelineRuntime
from weft.schedule import count_in_flight, generate

STEPS = 4
CUTS = 4
SCHEDULES = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 1, "zbv": 2,
    "dualpipev": 2,
}  # fmt: skip
BACKWARDS_REVERSED = ("looped_bfs",)
Arrays = dict[str, npt.NDArray[np.float32]]  # a tensor would travel as a handle on a rank that is gone


def tables(schedule: str, *, pp: int = 2, **rest: Any) -> dict[str, Any]:
    mesh = {"pp": pp, **rest.pop("mesh", {})}
    cut = {"schedule": schedule, "microbatches": CUTS, "virtual_stages": SCHEDULES[schedule]}
    return {"mesh": mesh, "pipeline": cut, **rest}


def first_gradients(rank: int, world: int, family: str, plan: dict[str, Any]) -> tuple[Arrays, float, dict[int, int]]:
    engine = build_engine(family, plan)
    kept: Arrays = {}
    engine.on_gradients = lambda found: kept.update({name: value.numpy().copy() for name, value in found.items()})
    loss = engine.step(global_batch(0)).loss
    pipeline = PipelineRuntime.of(engine)
    return kept, loss, dict(pipeline.schedule_runner.record.most_in_flight) if pipeline is not None else {}


def all_gradients(rank: int, world: int, family: str) -> dict[str, tuple[Arrays, float, dict[int, int]]]:
    return {name: first_gradients(rank, world, family, tables(name)) for name in SCHEDULES}


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2-four", marks=pytest.mark.slow)])
def test_every_schedule_has_the_bits_of_one_process(family: str) -> None:
    ((expected, loss, _),) = run_ranks(first_gradients, 1, family, {"pipeline": {"microbatches": CUTS}})
    by_rank = run_ranks(all_gradients, 2, family, timeout_s=120)
    for name, stages in SCHEDULES.items():
        found = [of_rank[name] for of_rank in by_rank]
        assert {value for _, value, _ in found} == {loss}, name
        gradients = {key: value for tensors, _, _ in found for key, value in tensors.items()}
        assert set(gradients) >= set(expected), name
        for key, value in expected.items():
            # the head has a copy of wte: two sums, added at the end; or micro-batches' terms in another order
            if "wte" in key or name in BACKWARDS_REVERSED:
                np.testing.assert_allclose(
                    gradients[key], value, rtol=SAME_STEP_REL, atol=SAME_STEP_REL * abs(value).max()
                )
            else:
                assert np.array_equal(gradients[key], value), (name, key)
        schedule = generate(name, num_ranks=2, num_microbatches=CUTS, virtual_stages=stages)
        planned = dict(enumerate(count_in_flight(schedule).by_stage_until_weight))
        assert {stage: most for _, _, held in found for stage, most in held.items()} == planned, name


def fused_gradients(rank: int, world: int, family: str, plans: dict[str, Any]) -> dict[str, tuple[Arrays, float]]:
    head_loss.CHUNK_ELEMENTS = 257 * 40  # 64 tokens a micro-batch: two stretches
    head_loss._ROWS = 1
    found = {}
    for name, plan in plans.items():
        gradients, loss, _ = first_gradients(rank, world, family, {**plan, "kernels": {"loss": "fused"}})
        found[name] = gradients, loss
    return found


def told_of_whole_logits(rank: int, world: int) -> list[tuple[bool, str]]:
    engine = build_engine("llama", {**tables("1f1b"), "kernels": {"loss": "fused"}})
    assert engine.head_loss is not None
    found = []
    for asked in ("", "[]" if rank == 1 else ""):
        engine.head_loss.full_logits_cause = asked
        found += [(row.on, row.why) for row in fast_path(engine) if row.technique == "fused head and loss"]
    return found


SPLIT = ["zero_bubble", "zbv"]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", SPLIT),
        pytest.param("llama", list(SCHEDULES), marks=pytest.mark.slow),
        pytest.param("qwen3-four", list(SCHEDULES), marks=pytest.mark.slow),  # tied
    ],
)
def test_a_fused_loss_gives_the_last_stage_its_gradients(family: str, names: list[str]) -> None:
    """Those of the head come with the loss: also where the other weights' wait for the second half of a backward."""
    cut: dict[str, Any] = {"pipeline": {"microbatches": CUTS}}
    ((whole, whole_loss, _),) = run_ranks(first_gradients, 1, family, cut)
    expected, loss = run_ranks(fused_gradients, 1, family, {"": cut})[0][""]
    assert loss == pytest.approx(whole_loss, rel=SAME_STEP_REL)
    by_rank = run_ranks(fused_gradients, 2, family, {name: tables(name) for name in names}, timeout_s=120)
    for name in names:
        found = [of_rank[name] for of_rank in by_rank]
        assert {value for _, value in found} == {loss}, name
        gradients = {key: value for tensors, _ in found for key, value in tensors.items()}
        for key, value in expected.items():
            close = SAME_STEP_REL * abs(value).max()
            np.testing.assert_allclose(value, whole[key], rtol=SAME_STEP_REL, atol=10 * close)
            if "embed" in key or name in BACKWARDS_REVERSED:
                np.testing.assert_allclose(gradients[key], value, rtol=SAME_STEP_REL, atol=close)
            else:
                assert np.array_equal(gradients[key], value), (name, key)


def compiled_gradients(
    rank: int, world: int, family: str, plans: dict[str, Any]
) -> dict[str, tuple[Arrays, float, int]]:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # of torch's own tracing
    compiled.BACKEND = "aot_eager"
    found = {}
    for name, plan in plans.items():
        torch._dynamo.reset()
        counters.clear()
        gradients, loss, _ = first_gradients(rank, world, family, {**plan, "compile": {"enabled": True}})
        assert not counters["graph_break"]
        found[name] = gradients, loss, counters["stats"]["unique_graphs"]
    return found


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["interleaved_1f1b"]),
        pytest.param("llama", ["naive", "gpipe", "1f1b", "looped_bfs"], marks=pytest.mark.slow),
        pytest.param("qwen3-four", ["1f1b", "interleaved_1f1b"], marks=pytest.mark.slow),  # tied
    ],
)
def test_compiled_blocks_of_all_stages_share_a_graph_and_have_the_gradients_of_eager_ones(
    family: str, names: list[str]
) -> None:
    ((expected, loss, _),) = run_ranks(first_gradients, 1, family, {"pipeline": {"microbatches": CUTS}})
    by_rank = run_ranks(compiled_gradients, 2, family, {name: tables(name) for name in names}, timeout_s=180)
    for name in names:
        found = [of_rank[name] for of_rank in by_rank]
        assert [graphs for _, _, graphs in found] == [1, 2], "one for the blocks, one for the last norm"
        assert [value for _, value, _ in found] == pytest.approx([loss, loss], rel=SAME_STEP_REL), name
        gradients = {key: value for tensors, _, _ in found for key, value in tensors.items()}
        for key, value in expected.items():
            close = SAME_STEP_REL * abs(value).max()
            np.testing.assert_allclose(gradients[key], value, rtol=SAME_STEP_REL, atol=close)


@pytest.mark.slow
def test_the_first_rank_tells_what_only_the_last_stage_has_seen() -> None:
    first, last = run_ranks(told_of_whole_logits, 2)
    assert first[0][0]
    assert last[0][0]
    assert first[1] == (False, "the model's code needs the full logits: on the last stage")
    assert last[1] == (False, "the model's code needs the full logits: []")


def layouts(world: int) -> dict[str, dict[str, Any]]:
    if world == 1:
        return {"single": {"pipeline": {"microbatches": CUTS}}}
    shards = {
        f"{name} x ZeRO-{zero}": tables(name, mesh={"dp_shard": 2}, data_parallel={"zero": zero})
        for name, zero in (("1f1b", 1), ("1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 1), ("zbv", 2), ("zbv", 3))
    }
    return {
        "1f1b x DDP": tables("1f1b", mesh={"dp_replicate": 2}),
        "zbv x DDP": tables("zbv", mesh={"dp_replicate": 2}),
        **shards,
        "1f1b x tp 2": tables("1f1b", mesh={"tp": 2}),
        "1f1b x tp 2, budget": tables("1f1b", mesh={"tp": 2}, activations={"policy": "budget", "mixture": [1, 2]}),
        "zbv x tp 2, recompute": tables("zbv", mesh={"tp": 2}, activations={"policy": "full"}),
    }


def curves(rank: int, world: int, family: str, names: list[str]) -> dict[str, tuple[list[Any], float]]:
    found = {}
    for name in names:
        engine = build_engine(family, layouts(world)[name])
        curve = train_steps(engine, STEPS - 1)
        evaluation = engine.evaluate(engine.share_of(global_batch(99))).loss
        found[name] = (curve + train_steps(engine, 1, first=STEPS - 1), evaluation)
    dist.barrier()
    return found


SAMPLE = ["1f1b x DDP", "1f1b x ZeRO-2", "interleaved_1f1b x ZeRO-3", "zbv x ZeRO-1", "1f1b x tp 2, budget"]
CASES = {
    "llama, sample": ("llama", SAMPLE),
    "llama": ("llama", [name for name in layouts(4) if name not in SAMPLE]),
    "qwen3-four": ("qwen3-four", ["1f1b x DDP", "1f1b x ZeRO-2", "1f1b x tp 2", "zbv x ZeRO-3"]),  # tied
    # dropout, learned positions
    "gpt2-four": ("gpt2-four", ["1f1b x DDP", "interleaved_1f1b x ZeRO-3", "1f1b x tp 2"]),
}


@pytest.mark.parametrize("case", by_default([case for case in CASES if "sample" in case], CASES))
def test_pipelines_compose(case: str) -> None:
    family, names = CASES[case]
    (single,) = run_ranks(curves, 1, family, ["single"])
    expected, evaluation = single["single"]
    for of_rank in run_ranks(curves, 4, family, names, timeout_s=240):
        for name, (found, evaluated) in of_rank.items():
            assert evaluated == pytest.approx(evaluation, abs=SAME_CURVE_LOSS_ABS), name
            for (loss, norm), (right, right_norm) in zip(found, expected, strict=True):
                assert loss == pytest.approx(right, abs=SAME_CURVE_LOSS_ABS), name
                assert norm == pytest.approx(right_norm, rel=SAME_CURVE_NORM_REL), name
