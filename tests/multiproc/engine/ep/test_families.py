"""Experts of Hugging Face families over two ranks, against one process in float64: logits and every gradient."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_families import FAMILIES
from gloo_ranks import run_ranks
from samples import by_default
from thread_ranks import give_values
from torch import Tensor, nn

from weft.core.memory_sections import Activations
from weft.core.run_spec import ModelSpec
from weft.engine.activations.recompute import apply_recompute
from weft.engine.buffers.changes import BufferChanges
from weft.engine.ep.apply import divide_experts
from weft.engine.ep.dispatch import DISPATCHERS
from weft.models.build import build_config, build_skeleton
from weft.models.ep.finder import find_expert_layout
from weft.models.layout import describe

# float64 throughout, but for routers that compute in float32 whatever the model's dtype
EXACT, FLOAT32_ROUTER = 1e-12, 1e-5
ROWS = 2  # per rank


def skeleton(family: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_skeleton(build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128))


def outcome(model: Any, ids: Tensor, pull: Tensor) -> dict[str, Tensor]:
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * pull).sum().backward()
    return {"logits": logits.detach(), **{name: value.grad for name, value in model.named_parameters()}}


def compare(rank: int, world: int, family: str) -> dict[str, float]:
    given = give_values(skeleton(family))
    layout, experts = describe(given), find_expert_layout(given)
    ids = torch.randint(3, 90, (world * ROWS, 12), generator=torch.Generator().manual_seed(1))
    pull = torch.randn(*ids.shape, 128, generator=torch.Generator().manual_seed(2)).double()
    expected = outcome(copy.deepcopy(given), ids, pull)
    own, group, worst = slice(rank * ROWS, (rank + 1) * ROWS), dist.group.WORLD, {}
    assert group is not None
    for kind, policy in [*((kind, "none") for kind in DISPATCHERS), ("tokens", "full")]:
        model = copy.deepcopy(given)
        shards = divide_experts(model, layout, experts, group=group, kind=kind)  # type: ignore[arg-type]
        if policy == "full":
            apply_recompute(model, layout, Activations(policy="full"), BufferChanges(model))
        found = outcome(model, ids[own], pull[own])
        worst[f"{kind}, {policy}"] = max(_error(key, found, expected, shards, own) for key in expected)
    return worst


def _error(key: str, found: dict[str, Any], expected: dict[str, Any], shards: dict[str, Any], own: slice) -> float:
    value, right = found[key], expected[key]
    if right is None:
        assert value is None, key
        return 0.0
    scale = right.abs().max().clamp_min(1e-9)
    if key in shards:
        (chunk,) = shards[key].chunks
        right = right[chunk.global_index]
    elif key == "logits":
        right = right[own]
    else:
        value = torch.zeros_like(right) if value is None else value
        dist.all_reduce(value)
    return float((value - right).abs().max() / scale)


@pytest.mark.parametrize("family", by_default(["mixtral", "gpt_oss", "deepseek_v3"], list(FAMILIES)))
def test_two_ranks_have_the_gradients_of_one(family: str) -> None:
    bound = EXACT if family == "gpt_oss" else FLOAT32_ROUTER
    for worst in run_ranks(compare, 2, family, timeout_s=120.0):
        assert {how: error for how, error in worst.items() if not error < bound} == {}, worst
