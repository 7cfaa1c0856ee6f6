"""The parameter groups of `fully_shard`, one per unit.

Private: no public call lists gathered tensors, sets the dtype of reduced gradients, or lets a shard arrive before its
gather, or tells the order of parameters in a gather. tests/fake/dryrun, tests/multiproc/engine/offload and
tests/multiproc/engine/dp/test_coded.py fail when it moves.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of all units of `model`, in the order of its modules: the root first."""
    return [group for unit in model.modules() if isinstance(unit, FSDPModule) for group in groups_of_unit(unit)]


def groups_of_unit(unit: FSDPModule) -> list[Any]:
    """The unit's own groups: one, or none if it has no parameters."""
    state = unit._get_fsdp_state()
    # before torch 2.13 a unit had one group
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def shard_sizes(unit: FSDPModule) -> tuple[int, ...]:
    """Elements of a rank's padded shard of each of the unit's parameters, in the order of its gathers."""
    return tuple(one._sharded_param_data.numel() for group in groups_of_unit(unit) for one in group.fsdp_params)
