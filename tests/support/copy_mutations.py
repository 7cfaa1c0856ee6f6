"""Bugs that give one copy of a parameter other bits in forwards: too small for any bound on losses or gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from weft.engine.dp.coded import CodedAllGather
from weft.engine.precision import _CastUnit
from weft.engine.updates import Updates

Bug = AbstractContextManager[Any]


def own_shard_not_rounded_in_a_gather() -> Bug:
    """The owner computes with its weights, all others with what its codes say."""
    gather = CodedAllGather.__call__

    def keeping(self: Any, output_tensor: Any, input_tensor: torch.Tensor, group: Any, **given: Any) -> None:
        own = input_tensor.clone()
        gather(self, output_tensor, input_tensor, group, **given)
        output_tensor.view(group.size(), -1)[group.rank()].copy_(own)

    return patch.object(CodedAllGather, "__call__", keeping)


def tied_copy_updated_by_itself() -> Bug:
    """The last stage rounds its copy of the table once more after every update."""
    update = Updates._update

    def twice(self: Any) -> Any:
        outcome = update(self)
        with torch.no_grad():
            for name in self.engine.layout.copies:
                parameter = self.engine.model.get_parameter(name)
                parameter.mul_(1 + 2.0**-16)
        return outcome

    return patch.object(Updates, "_update", twice)


def one_replica_casts_up() -> Bug:
    """The second replica's casts round its norms to the next number above."""
    cast = _CastUnit._cast

    def up(self: Any, master: Any) -> torch.Tensor:
        made: torch.Tensor = cast(self, master)
        return torch.nextafter(made, made + 1) if dist.get_rank() == 1 and made.ndim == 1 else made

    return patch.object(_CastUnit, "_cast", up)
