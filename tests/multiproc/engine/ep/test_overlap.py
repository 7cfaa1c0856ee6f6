"""Shared experts, and their backward, are computed while tokens travel; once, and with the values of one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expert_families import FAMILIES
from gloo_ranks import run_ranks
from thread_ranks import give_values
from torch import nn

from weft.core.plan import Activations
from weft.core.run_spec import ModelSpec
from weft.engine.activations.recompute import apply_recompute
from weft.engine.buffers.changes import BufferChanges
from weft.engine.ep import exchange
from weft.engine.ep.apply import divide_experts
from weft.engine.ep.dispatch import DISPATCHERS
from weft.engine.ep.shared import overlap_shared
from weft.models.build import build_config, build_skeleton
from weft.models.ep.finder import find_expert_layout
from weft.models.layout import describe


def build(family: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128)
        return give_values(build_skeleton(config))


def events(rank: int, world: int, policy: str) -> dict[str, list[str]]:
    """Per dispatcher: begins and ends of exchanges of tokens, and work of shared experts, of one block."""
    group, given, found = dist.group.WORLD, build("deepseek_v3"), {}
    assert group is not None
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(rank))
    for kind in DISPATCHERS:
        model, log = copy.deepcopy(given), []
        layout, experts = describe(model), find_expert_layout(model)
        divide_experts(model, layout, experts, group=group, kind=kind)  # type: ignore[arg-type]
        apply_recompute(model, layout, Activations(policy=policy), BufferChanges(model))  # type: ignore[arg-type]
        shared = model.get_submodule(f"{experts.layers[0].name.rpartition('.')[0]}.shared_experts")
        linear = shared.get_submodule("down_proj")
        linear.register_forward_hook(lambda *_, log=log: log.append("shared"))
        linear.weight.register_post_accumulate_grad_hook(lambda _, log=log: log.append("shared gradient"))
        trips = exchange._Trip
        with (
            mock.patch.object(trips, "begin_there", _logged(trips.begin_there, log, "begin")),
            mock.patch.object(trips, "arrive_there", _logged(trips.arrive_there, log, "end")),
            mock.patch.object(trips, "begin_back", _logged(trips.begin_back, log, "begin back")),
            mock.patch.object(trips, "arrive_back", _logged(trips.arrive_back, log, "end back")),
        ):
            model(input_ids=ids, use_cache=False).logits.sum().backward()
        found[kind] = log
    return found


def _logged(original: Any, log: list[str], name: str) -> Any:
    def call(*args: Any) -> Any:
        log.append(name)
        return original(*args)

    return call


@pytest.mark.parametrize("policy", ["none", "full"])
def test_shared_experts_are_computed_while_tokens_travel(policy: str) -> None:
    forward, backward = ["begin", "shared", "end"], ["begin back", "shared gradient", "end back"]
    again = forward if policy == "full" else []
    for found in run_ranks(events, 2, policy):
        assert found == {kind: [*forward, *again, *backward] for kind in DISPATCHERS}


def test_families_that_call_them_first_are_left_alone() -> None:
    model = build("qwen2_moe")
    assert all(overlap_shared(model, layer.name) is None for layer in find_expert_layout(model).layers)
