"""Shards of parameters in integers, such as the codes of an adapter's base, on torch 2.11.

There `fully_shard` creates every shard as a parameter that trains, and freezes it next; torch refuses a parameter of
integers that trains: "only Tensors of floating point dtype can require gradients".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

# No public way to create a frozen shard: tests/unit/engine/dp/test_integer_shards.py fails when the name moves.
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor, nn


class _Modules:
    """`torch.nn`, with frozen parameters of integers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # noqa: N802  # torch's
        return nn.Parameter(data, requires_grad=requires_grad and (data.is_floating_point() or torch.is_complex(data)))


@contextmanager
def frozen_integers() -> Iterator[None]:
    """Inside, `fully_shard` takes parameters of integers."""
    with mock.patch.object(fsdp_param, "nn", _Modules()):
        yield
