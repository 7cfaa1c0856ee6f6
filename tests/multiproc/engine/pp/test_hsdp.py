"""HSDP in a pipeline: two stages, each on two replicas of two shards, have the gradients and weights of one process.

A backward in two halves brings a unit's gradients in two goes, and a rank with both ends the root's stage by stage:
what waits for the sum over the replicas is never the same set of parameters twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gloo_ranks import run_ranks
from tiny import build_engine, global_batch
from tolerances import SAME_STEP_REL
from torch.distributed.tensor import DTensor

from weft.comm.observer import CollectiveObserver
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.pp.runtime import PipelineRuntime

CUTS, STEPS = 4, 2
MESH = {"pp": 2, "dp_replicate": 2, "dp_shard": 2}
VIRTUAL = {"1f1b": 1, "zero_bubble": 1, "zbv": 2}
# plain SGD: two of Adam's steps divide rounding by rounding where a gradient is almost zero
SGD = OptimizerPolicy(kind="sgd", learning_rate=0.1, momentum=0.0, weight_decay=0.0)
Arrays = dict[str, npt.NDArray[np.float32]]
Found = tuple[list[Arrays], Arrays, list[float], dict[str, int], int]


def plan_of(schedule: str, zero: int) -> dict[str, Any]:
    cut = {"schedule": schedule, "microbatches": CUTS, "virtual_stages": VIRTUAL[schedule]}
    return {"mesh": MESH, "data_parallel": {"zero": zero}, "pipeline": cut}


def whole(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return np.array(full.detach().numpy())


def train(family: str, plan: dict[str, Any]) -> Found:
    """Gradients of every step, the weights at the end, norms, collectives of one step more, and its sums."""
    gradients: list[Arrays] = []
    with build_engine(family, plan, optimizer=SGD) as engine:

        def keep(found: dict[str, torch.Tensor]) -> None:
            gradients.append({name: whole(value) for name, value in found.items()})

        engine.on_gradients = keep
        norms = [engine.step(engine.share_of(global_batch(step))).grad_norm for step in range(STEPS)]
        engine.on_gradients = None
        weights = {name: whole(value) for name, value in engine.model.named_parameters()}
        with CollectiveObserver() as seen:
            engine.step(engine.share_of(global_batch(STEPS)))
        units = {record.unit for record in engine.coverage() if record.trainable}  # some ranks have none of the root
        pipeline = PipelineRuntime.of(engine)
        num_shared = len(pipeline.shared.names) if pipeline is not None else 0
        return gradients, weights, norms, dict(seen.counts), len(units) + num_shared


def train_all(rank: int, world: int, family: str, plans: dict[str, dict[str, Any]]) -> dict[str, Found]:
    return {name: train(family, plan) for name, plan in plans.items()}


def require_near(found: Arrays, expected: Arrays, what: str) -> None:
    assert found
    for name, value in found.items():
        right = expected.get(name, expected.get("model.embed_tokens.weight"))  # the head's copy of a tied table
        assert right is not None
        np.testing.assert_allclose(
            value, right, rtol=SAME_STEP_REL, atol=SAME_STEP_REL * abs(right).max(), err_msg=f"{what}: {name}"
        )


def require_same_as_one_process(family: str, cases: list[tuple[str, int]]) -> None:
    (single,) = run_ranks(train_all, 1, family, {"single": {"pipeline": {"microbatches": CUTS}}})
    gradients, weights, norms, _, _ = single["single"]
    plans = {f"{schedule} x ZeRO-{zero}": plan_of(schedule, zero) for schedule, zero in cases}
    by_rank = run_ranks(train_all, 8, family, plans, timeout_s=300)
    for name in plans:
        assert set(weights) <= {key for of_rank in by_rank for key in of_rank[name][1]}, name
        for of_rank in by_rank:
            own_gradients, own_weights, own_norms, collectives, sums = of_rank[name]
            for step in range(STEPS):
                require_near(own_gradients[step], gradients[step], f"{name}, step {step}")
            require_near(own_weights, weights, name)
            assert own_norms == pytest.approx(norms, rel=SAME_STEP_REL), name
            assert collectives["all_reduce"] == sums, name


@pytest.mark.extended
def test_halves_of_a_backward() -> None:
    require_same_as_one_process("llama", [("zero_bubble", 2)])


@pytest.mark.slow
def test_every_stage_of_zero() -> None:
    require_same_as_one_process("llama", [(name, zero) for name in ("1f1b", "zero_bubble") for zero in (1, 2, 3)])


@pytest.mark.slow
def test_both_ends_on_one_rank() -> None:
    require_same_as_one_process("qwen3-four", [("zbv", 2), ("zbv", 3), ("1f1b", 2)])  # tied
