"""Replaces the parameters of a model by this rank's local shards, before `fully_shard` and any allocation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.core.shards import LocalShard
from weft.engine.weights.materialise import replace_parameter
from weft.models.layout import ModelLayout


@torch.no_grad()
def shard_parameters(model: nn.Module, layout: ModelLayout, shards: Mapping[str, LocalShard]) -> None:
    """Replace every sharded parameter by its local shard, at all its names, with its values."""
    for name, shard in shards.items():
        parameter = model.get_parameter(name)
        if not shard.is_sharded:
            continue
        own = torch.empty(shard.local_shape, dtype=parameter.dtype, device=parameter.device)
        if parameter.device.type != "meta":
            for chunk in shard.chunks:
                own[chunk.local_index].copy_(parameter[chunk.global_index])
        replace_parameter(model, layout, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
