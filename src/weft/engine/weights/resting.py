"""Weights that rest in the compute dtype, whose float32 masters are offloaded states (`core.masters`).

    weights at rest     trainable parameters, rounded to the compute dtype; frozen ones stay as they are
    gradients           float32, with the bits that they have beside float32 masters

Unsharded parameters get float32 gradients by torch's `Tensor.grad_dtype`. The unit's forward uses a view of the weight
(`engine/precision.py`): gradients of its several uses, as of tied weights, are summed in the compute dtype before they
are cast, as those of a cast are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from weft.engine.weights.units import groups_of
from weft.models.initial import Reader, WeightSource


class HeldValues:
    """The values of a model, on the host: what masters begin with, once weights are rounded."""

    def __init__(self, model: nn.Module) -> None:
        self._values = {name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()}

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]:
        for name in names:
            yield name, self._values[name].__getitem__


def source_of(model: nn.Module, given: WeightSource | None) -> WeightSource | None:
    """Where masters get their values: from the model, if it has some, before they are rounded."""
    is_real = all(parameter.device.type != "meta" for parameter in model.parameters())
    return HeldValues(model) if is_real else given


def keep_gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Gradients of `model`, whose parameters exist and have another dtype, have this one from now on."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype
    for group in groups_of(model):
        group._init_mp_dtypes = _with_gradients_in(dtype, group, group._init_mp_dtypes)


def _with_gradients_in(dtype: torch.dtype, group: Any, original: Callable[[], None]) -> Callable[[], None]:
    """`fully_shard` casts a reduced gradient to the dtype of the shard before it stores it. The dtype is private, and
    is set whenever a group is initialised, of which there may be several times. `set_all_reduce_hook` is public, but
    the rounded gradient would be stored besides. tests/multiproc/engine/offload/test_masters_away.py fails when this
    moves."""

    def init_dtypes() -> None:
        original()
        if group._orig_dtype is not None:
            group._orig_dtype = dtype

    return init_dtypes
