"""Shared experts, and their backward, are computed while tokens travel; once, and with the values of one process."""

from __future__ import annotations

import copy
import inspect
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

from weft.core.memory_sections import Activations
from weft.core.run_spec import ModelSpec
from weft.engine.activations.recompute import apply_recompute
from weft.engine.buffers.changes import BufferChanges
from weft.engine.ep import dispatch, exchange
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


def events(rank: int, world: int, policy: str, chunks: int) -> dict[str, list[str]]:
    """Per dispatcher: begins and ends of exchanges, and work of experts and shared experts, of one block."""
    group, given, found = dist.group.WORLD, build("deepseek_v3"), {}
    assert group is not None
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(rank))
    for kind in DISPATCHERS:
        model, log = copy.deepcopy(given), []
        layout, experts = describe(model), find_expert_layout(model)
        divide_experts(model, layout, experts, group=group, kind=kind, chunks=chunks)  # type: ignore[arg-type]
        apply_recompute(model, layout, Activations(policy=policy), BufferChanges(model))  # type: ignore[arg-type]
        shared = model.get_submodule(f"{experts.layers[0].name.rpartition('.')[0]}.shared_experts")
        linear = shared.get_submodule("down_proj")
        linear.register_forward_hook(lambda *_, log=log: log.append("shared"))
        linear.weight.register_post_accumulate_grad_hook(lambda _, log=log: log.append("shared gradient"))
        exchanges = exchange._Exchange
        compute = _logged(dispatch.compute, log, "experts")
        with (
            mock.patch.object(dispatch, "compute", compute),
            mock.patch.object(exchanges, "start_forward", _logged(exchanges.start_forward, log, "begin")),
            mock.patch.object(exchanges, "wait_forward", _logged(exchanges.wait_forward, log, "end")),
            mock.patch.object(exchanges, "start_backward", _logged(exchanges.start_backward, log, "begin back")),
            mock.patch.object(exchanges, "wait_backward", _logged(exchanges.wait_backward, log, "end back")),
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
    forward = ["begin", "shared", "end", "experts", "begin", "end"]
    backward = ["begin back", "end back", "begin back", "shared gradient", "end back"]
    expected = {kind: [*forward, *backward] for kind in DISPATCHERS}
    if policy == "full":
        expected = {kind: [*forward, *forward, *backward] for kind in DISPATCHERS}
        # the last reduce-scatter saves nothing: its backward comes first, and it is not repeated
        expected["gather"] = [*forward, *backward[:2], *forward[:4], *backward[2:]]
    for found in run_ranks(events, 2, policy, 1):
        assert found == expected


def test_a_chunk_travels_while_the_experts_compute_another() -> None:
    there, back = ["begin", "begin", "shared"], ["end", "end"]
    one = ["end", "experts", "begin"]  # the other's tokens travel, then its outputs
    backward = [
        *("begin back", "begin back", "end back", "begin back", "end back", "begin back", "shared gradient"),
        *("end back", "end back"),
    ]
    for found in run_ranks(events, 2, "none", 2):
        assert found == {kind: [*there, *one, *one, *back, *backward] for kind in DISPATCHERS}


def test_a_class_without_source_overlaps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3")
    (name,) = find_expert_layout(model).names
    assert overlap_shared(model, name) is not None
    monkeypatch.setattr(inspect, "getsource", mock.Mock(side_effect=OSError))
    assert overlap_shared(model, name) is None


def test_families_that_call_them_first_are_left_alone() -> None:
    model = build("qwen2_moe")
    assert all(overlap_shared(model, layer.name) is None for layer in find_expert_layout(model).layers)
