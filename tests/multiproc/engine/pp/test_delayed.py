"""PipeDream and PipeDream-2BW against the same delayed updates written out for one process, with plain SGD.

2BW         w(t+1) = w(t) - lr g_t(w(t-1))              one update a step
PipeDream   w_s(k+1) = w_s(k) - lr g_k(.. w_s(k-(p-1-s)) ..)   one a micro-batch, each stage by itself
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks
from tiny import CPU, FAMILIES, build_engine, global_batch
from tolerances import SAME_STEP_REL

from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.pp.runtime import PipelineRuntime
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.schedule import generate, weight_versions

STEPS, CUTS, RATE = 4, 4, 0.1
SAME_WEIGHTS_REL = 1e-5  # float32 after 16 updates; weights of another version are 1e-3 off
Arrays = dict[str, npt.NDArray[np.float32]]


BLOCKS = {2: (3, 3), 4: (1, 2, 2, 1)}  # of six on each stage


def tables(schedule: str, *, pp: int = 2, vertical_sync: bool = False, **mesh: int) -> dict[str, Any]:
    cut = {"schedule": schedule, "microbatches": CUTS, "vertical_sync": vertical_sync, "blocks": list(BLOCKS[pp])}
    return {"mesh": {"pp": pp, **mesh}, "pipeline": cut}


def trained(
    rank: int, world: int, family: str, plan: dict[str, Any], evaluates: bool
) -> tuple[Arrays, list[float], int, dict[int, int]]:
    policy = OptimizerPolicy(kind="sgd", learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    engine = build_engine(family, plan, optimizer=policy, clip_norm=0.0)
    losses = []
    for step in range(STEPS):
        losses.append(engine.step(engine.share_of(global_batch(step))).loss)
        if evaluates:
            engine.evaluate(engine.share_of(global_batch(99)))
    engine.drain()
    pipeline: Any = PipelineRuntime.of(engine)
    runner = pipeline.schedule_runner
    weights = {name: value.detach().numpy().copy() for name, value in engine.model.named_parameters()}
    return weights, losses, runner.versions.most, dict(runner.record.most_in_flight)


def all_trained(rank: int, world: int, family: str, plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {name: trained(rank, world, family, plan, False) for name, plan in plans.items()}
    first = next(iter(plans))
    return {**found, "evaluated": trained(rank, world, family, plans[first], True)}


def stage_of(name: str, *, num_stages: int) -> int:
    if ".layers." not in name:
        return 0 if "embed" in name else num_stages - 1
    block = int(name.split(".layers.")[1].split(".")[0])
    return next(stage for stage in range(num_stages) if block < sum(BLOCKS[num_stages][: stage + 1]))


def simulated(family: str, schedule: str, *, pp: int, vertical_sync: bool, dp: int) -> tuple[Arrays, list[float]]:
    config = build_config(FAMILIES[family], vocab_size=257)
    model = build_skeleton(config).to_empty(device=CPU)
    source = build_skeleton(config)
    buffers = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()
    weights = InitialWeights(source, describe(source), seed=0, device=CPU)
    now = {name: read(()).clone() for name, read in weights.readers([name for name, _ in model.named_parameters()])}
    versions, losses, is_each = [now], [], schedule == "pipedream"
    for step in range(STEPS):
        batch = global_batch(step)
        total, rows = 0.0, len(batch["labels"])
        summed = {name: torch.zeros_like(value) for name, value in versions[-1].items()}
        for index in range(CUTS):
            own, size = rows // dp, rows // dp // CUTS
            picked = [
                row for rank in range(dp) for row in range(rank * own + index * size, rank * own + (index + 1) * size)
            ]
            part = {key: value[picked] for key, value in batch.items()}
            newest = len(versions) - 1
            for name, parameter in model.named_parameters():
                lag = 1
                if is_each:
                    lag = pp - 1 if vertical_sync else pp - 1 - stage_of(name, num_stages=pp)
                parameter.data.copy_(versions[max(0, newest - lag)][name])
                parameter.grad = None
            logits = model(input_ids=part["input_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), ignore_index=-100, reduction="sum")
            (loss / ((part if is_each else batch)["labels"] != -100).sum()).backward()
            total += loss.item()
            for name, parameter in model.named_parameters():
                summed[name] += parameter.grad
            if is_each or index == CUTS - 1:
                versions.append({name: value - RATE * summed[name] for name, value in versions[-1].items()})
                summed = {name: torch.zeros_like(value) for name, value in versions[-1].items()}
        losses.append(total / int((batch["labels"] != -100).sum()))
    return {name: value.numpy() for name, value in versions[-1].items()}, losses


def require_alike(of_ranks: list[Any], expected: Arrays, losses: list[float]) -> None:
    found = {name: value for weights, *_ in of_ranks for name, value in weights.items()}
    assert set(found) >= set(expected)
    for _, told, *_ in of_ranks:
        np.testing.assert_allclose(told, losses, rtol=SAME_STEP_REL)
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= SAME_WEIGHTS_REL * np.linalg.norm(value), name


def test_two_stages_train_as_their_delays_say() -> None:
    plans = {"2bw": tables("pipedream_2bw"), "pipedream": tables("pipedream")}
    of_ranks = run_ranks(all_trained, 2, "llama", plans, timeout_s=120)
    courses = {}
    for key, schedule in (("2bw", "pipedream_2bw"), ("pipedream", "pipedream")):
        courses[key] = simulated("llama", schedule, pp=2, vertical_sync=False, dp=1)
        require_alike([found[key] for found in of_ranks], *courses[key])
        planned = weight_versions(generate(schedule, num_ranks=2, num_microbatches=CUTS))
        assert tuple(found[key][2] for found in of_ranks) == planned
        assert [found[key][3] for found in of_ranks] == [{0: 2}, {1: 1}]
    late = simulated("llama", "pipedream", pp=2, vertical_sync=True, dp=1)[0]  # one stage reads one version before
    apart = [np.linalg.norm(value - courses["pipedream"][0][name]) for name, value in late.items()]
    assert max(apart) > 100 * SAME_WEIGHTS_REL * max(map(np.linalg.norm, late.values()))
    for found in of_ranks:  # draining after every step, to evaluate, changes no bit
        weights, losses, *_ = found["evaluated"]
        assert losses == found["2bw"][1]
        assert all(np.array_equal(weights[name], value) for name, value in found["2bw"][0].items())


@pytest.mark.slow
def test_four_stages_ties_replicas_and_vertical_sync() -> None:
    plans = {
        "2bw": tables("pipedream_2bw", pp=4),
        "pipedream": tables("pipedream", pp=4),
        "vertical": tables("pipedream", pp=4, vertical_sync=True),
        "2bw x DDP": tables("pipedream_2bw", dp_replicate=2),
        "pipedream x DDP": tables("pipedream", dp_replicate=2),
        "pipedream x tp": tables("pipedream", tp=2),
    }
    of_ranks = run_ranks(all_trained, 4, "llama", plans, timeout_s=300)
    for key, plan in plans.items():
        if "tp" in plan["mesh"]:
            continue  # ranks have parts: losses below
        schedule, mesh = plan["pipeline"]["schedule"], plan["mesh"]
        course = simulated(
            "llama",
            schedule,
            pp=mesh["pp"],
            vertical_sync=plan["pipeline"]["vertical_sync"],
            dp=mesh.get("dp_replicate", 1),
        )
        require_alike([found[key] for found in of_ranks], *course)
    losses = simulated("llama", "pipedream", pp=2, vertical_sync=False, dp=1)[1]
    np.testing.assert_allclose(of_ranks[0]["pipedream x tp"][1], losses, rtol=SAME_STEP_REL)
    assert [found["pipedream"][2] for found in of_ranks] == [4, 3, 2, 1]
    assert [found["vertical"][2] for found in of_ranks] == [4, 4, 4, 4]
    assert [found["2bw"][2] for found in of_ranks] == [2, 2, 2, 2]


@pytest.mark.slow
def test_a_tied_table_under_two_buffers() -> None:
    plan = tables("pipedream_2bw")
    by_cost = {key: value for key, value in plan["pipeline"].items() if key != "blocks"}
    of_ranks = run_ranks(all_trained, 2, "qwen3-four", {"2bw": {**plan, "pipeline": by_cost}}, timeout_s=120)
    course = simulated("qwen3-four", "pipedream_2bw", pp=2, vertical_sync=False, dp=1)
    require_alike([found["2bw"] for found in of_ranks], *course)


def refused(rank: int, world: int, family: str, plan: dict[str, Any]) -> str:
    from weft.core.errors import WeftError

    try:
        build_engine(family, plan)
    except WeftError as error:
        return f"[{error.code}] {error.message} hint: {error.hint}"
    return "built"


def test_what_cannot_be_is_refused_by_name() -> None:
    (tied, _) = run_ranks(refused, 2, "qwen3-tied", {**tables("pipedream"), "pipeline": {"schedule": "pipedream"}})
    assert tied.startswith("[W207] pipedream updates each stage separately, and the first and the last stage share")
    assert "pipedream_2bw" in tied
    (sharded, *_) = run_ranks(refused, 2, "llama", {**tables("pipedream_2bw"), "data_parallel": {"zero": 1}})
    assert "sharded weights" in sharded
    (half, *_) = run_ranks(refused, 2, "llama", {**tables("pipedream"), "precision": {"preset": "fp16"}})
    assert "loss scale" in half
