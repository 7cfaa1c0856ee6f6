"""A weight that two stages share (the token table and the output head): a copy on each, kept equal.

Their gradients are summed over the two ranks before the norm, so both take the same update; the first stage's copy is
the one that counts, is saved and is named; after loading it goes to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.engine.mesh import Topology
from weft.engine.ownership import local


class SharedWeights:
    """`names`: this rank's names of the shared weights, in an order that both ranks agree on."""

    def __init__(self, names: tuple[str, ...], group: dist.ProcessGroup | None) -> None:
        self.names, self.group = names, group

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for work in self.begin_sum(parameters):
            work.wait()

    @torch.no_grad()
    def begin_sum(self, parameters: Mapping[str, nn.Parameter]) -> list[dist.Work]:
        """The sums, under way: gradients are not to be touched before each has been waited for."""
        works = []
        for parameter in (parameters[name] for name in self.names if name in parameters):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(local(parameter.grad), group=self.group, async_op=True))
        return works

    @torch.no_grad()
    def spread(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        """The first stage's values and moments to the other."""
        for name in self.names:
            state = optimizer.state.get(parameters[name], {})
            values = [parameters[name].detach(), *(state[key] for key in sorted(state))]
            for value in (value for value in values if isinstance(value, torch.Tensor)):
                dist.broadcast(local(value), group=self.group, group_src=0)


def pair_group(topology: Topology, first_place: int, last_place: int) -> dist.ProcessGroup | None:
    """First and last stage's ranks at this rank's place in its stage; collective. None on other ranks."""
    size = topology.stage_size
    lines = [[first_place * size + place, last_place * size + place] for place in range(size)]
    return topology.groups.of_lines(lines, title="tied weights")
