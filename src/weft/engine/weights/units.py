"""The parameter groups of `fully_shard`, one per unit.

Private: no public call lists gathered tensors, sets the dtype of reduced gradients, or lets a shard arrive before its
gather. tests/fake/dryrun and tests/multiproc/engine/offload fail when it moves.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of all units of `model`, in the order of its modules: the root first."""
    found: list[Any] = []
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            # before torch 2.13 a unit had one group
            found += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]
