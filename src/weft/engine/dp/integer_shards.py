"""Shards of parameters in integers, such as the codes of an adapter's base, on torch 2.11.

There `fully_shard` creates every shard as a parameter that trains, and freezes it next, but torch refuses a parameter
of integers that trains; and mixed precision casts integers as it casts weights. Torch 2.13 does neither.
"""

from __future__ import annotations

from typing import Any

# No public way to create a frozen shard: tests/unit/engine/dp/test_integer_shards.py fails when a name moves.
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

_torch_dtypes: Any = fsdp_param.FSDPParam.init_dtype_attrs


class _Modules:
    """`torch.nn`, with frozen parameters of integers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # noqa: N802  # torch's name
        return nn.Parameter(data, requires_grad=requires_grad and data.dtype.is_floating_point)


def patch_integer_shards() -> None:
    """Affects every sharded model of this process; those of numbers with a point are as they were."""
    fsdp_param.nn = _Modules()  # type: ignore[assignment, attr-defined]
    fsdp_param.FSDPParam.init_dtype_attrs = _init_dtypes  # type: ignore[method-assign, assignment]


def _init_dtypes(self: Any, policy: MixedPrecisionPolicy) -> None:
    _torch_dtypes(self, policy)
    if not self.orig_dtype.is_floating_point:
        self.param_dtype = None
