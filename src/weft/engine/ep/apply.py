"""Divides the experts of a model over the ranks of a group, and puts dispatchers around their modules.

A rank's experts are one span of dimension 0: values, norms and checkpoints follow from the chunks (`core/shards.py`).
Model code is unchanged: it calls the module with all of this rank's tokens and any expert.

| with tensor parallelism | experts are sharded by        | rows of a tp rank                                         |
| ----------------------- | ----------------------------- | --------------------------------------------------------- |
| `folded`                | their number, over ep         | its slice of the sequence, or else a share of equal rows   |
| `width`                 | their number and their width  | those of its tp group: tp gathers and adds up around this |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import axes
from weft.core.errors import MeshError, ModelError
from weft.core.experts import DispatcherKind, WireFormat, choose_dispatcher
from weft.core.shards import LocalShard, balanced_span, compose, local_shard
from weft.engine.ep.context import EPContext
from weft.engine.ep.dispatch import DISPATCHERS, Dispatcher, dispatch_share, no_overlap
from weft.engine.ep.exchange import Group
from weft.engine.ep.grouped import grouped_forward, grouped_linear, has_grouped_products
from weft.engine.ep.shared import EarlyShared, overlap_shared
from weft.engine.mesh import Topology
from weft.engine.weights.local_shards import shard_parameters
from weft.engine.wrap_forward import Forward, wrap_own_forward
from weft.models.ep.finder import find_expert_layout
from weft.models.ep.layout import ExpertLayout
from weft.models.layout import ModelLayout


def find_experts(model: nn.Module, topology: Topology) -> ExpertLayout | None:
    """The experts of `model`, which must have some; None without expert parallelism."""
    if topology.expert_mesh is None:
        return None
    experts = find_expert_layout(model)
    _require_experts(experts, type(model).__name__)
    return experts


def apply_expert_parallel(
    model: nn.Module,
    layout: ModelLayout,
    experts: ExpertLayout,
    topology: Topology,
    *,
    kind: DispatcherKind | Literal["auto"],
    wire: WireFormat,
    chunks: int,
    is_sharded: bool,
    same_rows: Group | None = None,
    tensor_shards: Mapping[str, LocalShard] = MappingProxyType({}),
) -> EPContext:
    """Divide the experts of `model`. `is_sharded`: ZeRO adds the gradients of ranks with the same experts.

    `tensor_shards`: of parameters that tensor parallelism has sharded already. `same_rows`: see `dispatch_share`.
    """
    group, mesh = topology.group(axes.EP), topology.expert_dp_mesh
    if mesh is None:
        raise MeshError("the mesh has no expert-parallel ranks", hint="set mesh.ep")
    if kind == "auto":
        sizes = ((layer.num_experts, layer.top_k) for layer in experts.layers)
        kind = choose_dispatcher(sizes, ep=dist.get_world_size(group))
    own = divide_experts(model, layout, experts, group=group, kind=kind, wire=wire, chunks=chunks, same_rows=same_rows)
    shards = {
        name: compose(tensor_shards[name], shard) if name in tensor_shards else shard for name, shard in own.items()
    }
    same_experts = None if is_sharded else topology.group(axes.EDP)
    return EPContext(group=group, experts=experts, mesh=mesh, same_experts=same_experts, shards=shards)


def divide_experts(
    model: nn.Module,
    layout: ModelLayout,
    experts: ExpertLayout,
    *,
    group: Group,
    kind: DispatcherKind,
    wire: WireFormat = "activations",
    chunks: int = 1,
    same_rows: Group | None = None,
) -> dict[str, LocalShard]:
    """Keep this rank's experts and dispatch to those of others. Returns the shard of every parameter of experts."""
    shards = expert_shards(model, experts, degree=dist.get_world_size(group), place=dist.get_rank(group))
    shard_parameters(model, layout, shards)
    for layer in experts.layers:
        module = model.get_submodule(layer.name)
        dispatcher = DISPATCHERS[kind](layer.num_experts, group, wire=wire, chunks=chunks)
        for key in layer.counts:
            setattr(module, key, dispatcher.own.size)
        shared = overlap_shared(model, layer.name)
        wrap_own_forward(module, _Dispatched(module, dispatcher, same_rows, shared))
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

    def __init__(
        self, module: nn.Module, dispatcher: Dispatcher, same_rows: Group | None, shared: EarlyShared | None
    ) -> None:
        self.dispatcher, self.same_rows, self.shared = dispatcher, same_rows, shared
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._module, self._linear = module, grouped_linear() if has_grouped_products(module) else None
        self.compiled: Forward | None = None

    def compile_inside(self, compiled: Callable[..., Forward]) -> None:
        """Compile the experts, whose number of rows changes; the exchanges around them are not compiled."""
        self.compiled = compiled(grouped_forward, has_any_rows=True) if self._linear is not None else None

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
        experts = functools.partial(self._compute, forward)
        rows = hidden if hidden.ndim == 2 else hidden.flatten(0, -2)
        overlapped = no_overlap if self.shared is None else functools.partial(self.shared.compute, hidden)
        try:
            if self.same_rows is None:
                made = self.dispatcher(experts, rows, index, weights, overlapped)
            else:
                made = dispatch_share(self.dispatcher, experts, rows, index, weights, overlapped, group=self.same_rows)
        except BaseException:  # a recomputed forward ends early
            if self.shared is not None:
                self.shared.forget()
            raise
        return made if hidden.ndim == 2 else made.view(hidden.shape)  # `fully_shard` warns of a view

    def _compute(self, forward: Forward, rows: Tensor, numbers: Tensor) -> Tensor:
        if self._linear is not None:
            compute = self.compiled or grouped_forward
            return compute(self._module, rows, numbers, self._linear)
        return forward(rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1))  # type: ignore[no-any-return]
