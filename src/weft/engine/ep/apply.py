"""Divides the experts of a model over the ranks of a group, and puts dispatchers around their modules.

A rank's experts are one span of dimension 0: values, norms and checkpoints follow from the chunks (`core/shards.py`).
Model code is unchanged: it calls the module with all of this rank's tokens and any expert.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import axes
from weft.core.errors import MeshError, ModelError
from weft.core.experts import DispatcherKind, choose_dispatcher
from weft.core.shards import LocalShard, balanced_span, local_shard
from weft.engine.ep.context import EPContext
from weft.engine.ep.dispatch import DISPATCHERS, Dispatcher
from weft.engine.ep.exchange import Group
from weft.engine.mesh import Topology
from weft.engine.weights.local_shards import shard_parameters
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.ep.finder import find_expert_layout
from weft.models.ep.layout import ExpertLayout
from weft.models.layout import ModelLayout


def apply_expert_parallel(
    model: nn.Module, layout: ModelLayout, topology: Topology, *, kind: DispatcherKind | Literal["auto"]
) -> EPContext | None:
    """Divide the experts of `model`, which must have some; None without expert parallelism."""
    mesh = topology.expert_dp_mesh
    if mesh is None:
        return None
    experts, group = find_expert_layout(model), topology.group(axes.EP)
    _require_experts(experts, type(model).__name__)
    if kind == "auto":
        sizes = ((layer.num_experts, layer.top_k) for layer in experts.layers)
        kind = choose_dispatcher(sizes, ep=dist.get_world_size(group))
    shards = divide_experts(model, layout, experts, group=group, kind=kind)
    return EPContext(group=group, experts=experts, mesh=mesh, shards=shards)


def divide_experts(
    model: nn.Module, layout: ModelLayout, experts: ExpertLayout, *, group: Group, kind: DispatcherKind
) -> dict[str, LocalShard]:
    """Keep this rank's experts and dispatch to those of others. Returns the shard of every parameter of experts."""
    shards = expert_shards(model, experts, degree=dist.get_world_size(group), place=dist.get_rank(group))
    shard_parameters(model, layout, shards)
    for layer in experts.layers:
        module, dispatcher = model.get_submodule(layer.name), DISPATCHERS[kind](layer.num_experts, group)
        for key in layer.counts:
            setattr(module, key, dispatcher.own.size)
        wrap_forward(module, _Dispatched(module, dispatcher))
    return shards


def _require_experts(experts: ExpertLayout, model_name: str) -> None:
    if reason := experts.why_not_divided:
        raise MeshError(f"the experts of {model_name} cannot be divided over ranks: {reason}", hint="use mesh.ep = 1")


def expert_shards(model: nn.Module, experts: ExpertLayout, *, degree: int, place: int) -> dict[str, LocalShard]:
    """The local shard of every parameter of experts on the rank at `place` of `degree`."""
    found = {}
    for layer in experts.layers:
        if layer.num_experts < degree:
            raise MeshError(
                f"{layer.name} has {layer.num_experts} experts, fewer than mesh.ep = {degree}",
                hint=f"use mesh.ep of at most {layer.num_experts}",
            )
        span = balanced_span(layer.num_experts, degree=degree, place=place)
        for name in layer.parameters:
            found[name] = local_shard(model.get_parameter(name).shape, {0: [span]}, axis=axes.EP)
    return found


class _Dispatched:
    """The layer around a module's forward. Families name its arguments differently, so they go by position."""

    def __init__(self, module: nn.Module, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph per number of rows would be compiled
    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, index, weights = (given.pop(name) for name in self._names[:3])
        if given or index.ndim != 2 or weights.shape != index.shape:
            shapes = f"index {tuple(index.shape)}, weights {tuple(weights.shape)}"
            raise ModelError(
                f"experts were called with {shapes} and {sorted(given) or 'no more arguments'}",
                hint="expert parallelism needs [tokens, experts per token] of both; use mesh.ep = 1",
            )
        if hidden.ndim == 2:  # no view of the result: `fully_shard` warns of one
            return self.dispatcher(forward, hidden, index, weights)
        return self.dispatcher(forward, hidden.flatten(0, -2), index, weights).view(hidden.shape)
