"""Experts over ranks that are tensor-parallel too, against one process in float64: logits and every gradient."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expert_families import FAMILIES
from gloo_ranks import run_ranks
from samples import by_default
from thread_ranks import give_values
from torch import Tensor, nn

from weft.core import axes
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.axis import Axes
from weft.engine.ep.dispatch import DISPATCHERS
from weft.engine.mesh import build_topology
from weft.engine.tensor_and_expert import apply_tensor_and_expert
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe

# float64 throughout, but for routers that compute in float32 whatever the model's dtype
EXACT, FLOAT32_ROUTER = 1e-12, 1e-5
TESTED = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen2_moe")
ROWS = 3  # per data-parallel rank
LENGTH = {True: 8, False: 7}  # by sequence parallel: 21 tokens do not divide over 2 or 4 ranks


def layouts(world: int) -> list[tuple[dict[str, int], str]]:
    """(mesh, expert_parallel.tensor) of `world` ranks."""
    if world == 2:
        return [({"tp": 2, "ep": 2}, "folded")]
    whole = {"tp": 2, "dp_shard": 2}
    folded = [{**whole, "ep": 2}, {**whole, "ep": 4}, {"tp": 4, "ep": 2}]
    return [*((mesh, "folded") for mesh in folded), ({**whole, "ep": 2}, "width")]


def outcome(model: Any, ids: Tensor, pull: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * pull).sum().backward()
    return logits.detach()  # type: ignore[no-any-return]


def compare(rank: int, world: int, family: str) -> dict[str, float]:
    """The largest relative difference of logits and gradients, by layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = give_values(
            build_skeleton(build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128))
        )
    worst = {}
    for (mesh, tensor), is_stream in itertools.product(layouts(world), (True, False)):
        plan = Plan.from_tables(
            {
                "mesh": mesh,
                "expert_parallel": {"tensor": tensor},
                "tensor_parallel": {"sequence_parallel": is_stream},
            }
        )
        for kind in list(DISPATCHERS) if world == 2 else ("tokens",):
            with mock.patch.dict(DISPATCHERS, {"tokens": DISPATCHERS[kind]}):
                worst[f"{mesh}, {tensor}, sequence parallel {is_stream}, {kind}"] = _worst(given, plan)
    return worst


def _worst(given: nn.Module, plan: Plan) -> float:
    topology = build_topology(plan, device_type="cpu")
    shape = topology.dp_degree * ROWS, LENGTH[plan.tensor_parallel.sequence_parallel]
    ids = torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))
    pull = torch.randn(*ids.shape, 128, generator=torch.Generator().manual_seed(2)).double()
    reference, model = copy.deepcopy(given), copy.deepcopy(given)
    logits = outcome(reference, ids, pull)
    layout = describe(model)
    tp, ep = apply_tensor_and_expert(model, plan, topology, layout=layout, keep_logits_full=True)
    assert tp is not None
    assert ep is not None
    own = slice(topology.dp_rank * ROWS, (topology.dp_rank + 1) * ROWS)
    found = outcome(model, ids[own], pull[own])
    parameters, contexts = dict(model.named_parameters()), Axes((tp, ep))
    contexts.sum_gradients(parameters)
    errors = [_relative(found, logits[own], logits)]
    for name, expected in reference.named_parameters():
        right, value = expected.grad, parameters[name].grad
        if right is None:
            assert value is None or not value.any(), name
            continue
        value = torch.zeros_like(parameters[name]) if value is None else value
        if plan.data_parallel.zero > 0:  # no `fully_shard` here: it would add these
            dist.all_reduce(value, group=topology.group(axes.EDP) if name in ep.shards else topology.dp_group)
        shard = contexts.shards[name]
        assert value.shape == shard.local_shape, name
        errors += [_relative(value[one.local_index], right[one.global_index], right) for one in shard.chunks]
    topology.close()
    return max(errors)


def _relative(found: Tensor, right: Tensor, full: Tensor) -> float:
    if not right.numel():
        return 0.0
    return float((found - right).abs().max() / full.abs().max().clamp_min(1e-9))


CASES = by_default([("deepseek_v3", 2), ("mixtral", 4)], [(family, world) for family in TESTED for world in (2, 4)])


@pytest.mark.parametrize(("family", "world"), CASES)
def test_every_layout_has_the_gradients_of_one_process(family: str, world: int) -> None:
    bound = EXACT if family == "gpt_oss" else FLOAT32_ROUTER
    for worst in run_ranks(compare, world, family, timeout_s=240.0):
        assert {how: error for how, error in worst.items() if not error < bound} == {}, worst
