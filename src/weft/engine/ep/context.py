"""The applied expert-parallel axis of a rank: the shards of its experts, and the group that exchanges tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.core import axes
from weft.core.shards import LocalShard
from weft.engine.axis import AxisContext
from weft.models.ep.layout import ExpertLayout
from weft.models.layout import ModelLayout


@dataclass(frozen=True, kw_only=True)
class EPContext(AxisContext):
    """Gradients of experts need no sum over the group: tokens of all its ranks have come to them.

    `same_experts`: ranks whose gradients of the same experts are partial sums, unless `fully_shard` adds them.
    """

    axis = axes.EP

    group: dist.ProcessGroup
    experts: ExpertLayout
    mesh: DeviceMesh  # of the ranks that hold the same experts
    same_experts: dist.ProcessGroup | None = None
    shards: Mapping[str, LocalShard] = field()
    replicated_reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return [self.group]

    @property
    def activation_groups(self) -> Sequence[dist.ProcessGroup]:
        return self.groups

    @property
    def units(self) -> dict[str, DeviceMesh]:
        """Modules that are units of `fully_shard`, with their meshes."""
        return {layer.name: self.mesh for layer in self.experts.layers}

    @torch.no_grad()
    def sum_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        for name in self.shards if self.same_experts is not None else ():
            gradient = trained[name].grad if name in trained else None
            if gradient is not None:
                dist.all_reduce(gradient, group=self.same_experts)

    def of_stages(self, layout: ModelLayout) -> EPContext:
        """Restrict the experts to those of this rank's pipeline stages."""
        shards = {name: shard for name, shard in self.shards.items() if name in layout.unit_of}
        return replace(self, shards=shards, experts=self.experts.within(layout.unit_of))
