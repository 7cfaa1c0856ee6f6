"""Weights that two stages share (token embedding and output head): a copy on each, kept equal.

Gradients are summed over the two ranks before the norm, so both make the same update. Norms, counts and checkpoints
use the first stage's copy; after loading it is broadcast to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.comm.observer import wire_format
from weft.engine.mesh import Topology
from weft.engine.ownership import local
from weft.engine.precision import zero_gradient


class SharedWeights:
    """`names`: this rank's names of the shared weights, in the same order on both ranks."""

    def __init__(self, names: tuple[str, ...], group: dist.ProcessGroup | None) -> None:
        self.names, self.group = names, group

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for work in self.begin_sum(parameters):
            work.wait()

    @torch.no_grad()
    def begin_sum(self, parameters: Mapping[str, nn.Parameter]) -> list[dist.Work]:
        """Begin the sums: gradients must not be read or changed before each work was waited for."""
        works = []
        for parameter in (parameters[name] for name in self.names if name in parameters):
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
            with wire_format("tied", "float32"):  # not over data-parallel ranks: no part of precision.reduce
                works.append(dist.all_reduce(local(parameter.grad), group=self.group, async_op=True))
        return works

    @torch.no_grad()
    def broadcast(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        masters: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Broadcast the first stage's values and moments to the other."""
        for name in self.names:
            parameter = parameters[name]
            state = optimizer.state.get(parameter, {})
            values = [masters.get(parameter, parameter.detach()), *(state[key] for key in sorted(state))]
            for value in (local(value) for value in values if isinstance(value, torch.Tensor)):
                here = value.to(parameter.device)  # offloaded values are sent from the device
                dist.broadcast(here, group=self.group, group_src=0)
                if here is not value:
                    value.copy_(here)


def pair_group(topology: Topology, first_place: int, last_place: int) -> dist.ProcessGroup | None:
    """The ranks of the first and the last stage with this rank's dp and tp rank; collective. None on other stages."""
    size = topology.stage_size
    rank_lists = [[first_place * size + place, last_place * size + place] for place in range(size)]
    return topology.groups.new_disjoint(rank_lists, title="tied weights")
