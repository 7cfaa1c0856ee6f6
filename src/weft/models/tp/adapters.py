"""Shards of low-rank adapters: each factor follows its linear, W x + B (A x).

column linear   B sharded by outputs as W, A replicated     every rank has a partial sum of A's gradient
row linear      A sharded by inputs as W, B replicated      B A x is a partial sum as W x; so is B's gradient
other linears   inside a region both are replicated, and both gradients are partial sums
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from weft.models.tp.layout import LinearShards, ParameterShards, Region
from weft.models.tp.roles import is_factor


def with_adapters(model: nn.Module, region: Region) -> Region:
    """The region with the factors of its linears."""
    sharded = {linear.name: linear for linear in region.linears}
    tensors, partial = [], []
    for name in _factors(model, region):
        owner, _, factor = name.removesuffix(".weight").rpartition(".")
        linear = sharded.get(owner)
        if linear is not None and factor == ("lora_B" if linear.side == "column" else "lora_A"):
            tensors.append(_shards(name, linear))
        else:
            partial.append(name)
    return replace(region, tensors=(*region.tensors, *tensors), partial=(*region.partial, *partial))


def _shards(name: str, linear: LinearShards) -> ParameterShards:
    if linear.side == "column":
        return ParameterShards(name=name, dim=0, segments=linear.outputs)
    return ParameterShards(name=name, dim=1, segments=linear.inputs)


def _factors(model: nn.Module, region: Region) -> list[str]:
    """Factors of the region's linears, and of linears inside its entries."""
    owners = tuple(f"{name}." for name in (*region.entries, *(linear.name for linear in region.linears)))
    return [
        name for name, _ in model.named_parameters() if name.startswith(owners) and is_factor(name.rpartition(".")[0])
    ]
