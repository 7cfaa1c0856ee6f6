"""Placeholders for parts of a model on other stages: blocks, parameters, their outputs.

Most of them are NaN, so that accidental use shows in the results. `probe` runs a model's forward with them, and
pipeline stages use the same ones, so the probe runs under the conditions of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class BlockPlaceholder(nn.Module):
    """A placeholder for a block; attributes that the model's code reads (the kind of attention) are the block's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block  # as a submodule: `fully_shard` looks for its units among them

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore all modules and attributes on exit: BigBird replaces its attention during the forward. Buffers are copies
    inside, since a batch norm would add the placeholders' values to its running statistics."""
    tables = ("_modules", "_parameters", "_buffers")
    kept = [
        (vars(module), dict(vars(module)), [dict(vars(module)[key]) for key in tables]) for module in model.modules()
    ]
    for module in model.modules():
        module._buffers.update({key: value.clone() for key, value in module._buffers.items() if value is not None})
    try:
        yield
    finally:
        for live, own, contents in kept:
            live.clear()
            live.update(own)
            for key, content in zip(tables, contents, strict=True):
                live[key].clear()
                live[key].update(content)


def placeholder_output(hidden: Tensor, num_outputs: int, *, number: float = float("nan")) -> Any:
    """A placeholder for a block's output. Values other than the hidden states are NaN: no stage sends them."""
    others = (torch.full((), number, device=hidden.device),) * (num_outputs - 1)
    return (hidden, *others) if num_outputs else hidden


def placeholder_tensor(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, number: float = float("nan")
) -> Tensor:
    """A NaN tensor of this shape with memory for one number."""
    return torch.full((), number, dtype=dtype, device=device).expand(tuple(shape))


def placeholder_like(hidden: Tensor) -> Tensor:
    """A NaN placeholder for a block's output on input `hidden`."""
    dtype = hidden.dtype if hidden.is_floating_point() else torch.get_default_dtype()
    return placeholder_tensor(hidden.shape, dtype=dtype, device=hidden.device)


class NoTable:
    """Replaces the forward of another stage's token table, tensor parallelism included: no collective runs."""

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.dtype, self.device = width, dtype, device

    def __call__(self, forward: Callable[..., Any], ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(ids, Tensor):  # a position table whose input is a shape
            return forward(ids, *args, **kwargs)
        return placeholder_tensor((*ids.shape, self.width), dtype=self.dtype, device=self.device)


class _Noted(Tensor):
    """A tensor that records its use in a computation; reads of its shape or dtype do not count."""

    plain: Tensor
    record: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        records: list[Callable[[], None]] = []
        result = func(*_plain(args, records), **_plain(kwargs or {}, records))
        if any(True for _ in tensors_in(result)):
            for record in records:
                record()
        return result


def noted(plain: Tensor, record: Callable[[], None]) -> Tensor:
    value = plain.as_subclass(_Noted)
    value.plain, value.record = plain, record
    return value


def _plain(value: Any, records: list[Callable[[], None]]) -> Any:
    if isinstance(value, _Noted):
        records.append(value.record)
        return value.plain
    if type(value) in (tuple, list):
        return type(value)(_plain(item, records) for item in value)
    if type(value) is dict:
        return {key: _plain(item, records) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
