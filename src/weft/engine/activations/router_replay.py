"""Replays the choices of routers in a recomputed forward: a token goes to the experts of its first forward.

A router computed again may choose otherwise between experts that are almost tied. Grouped matmuls have the same shapes
for any choice, so nothing fails: gradients are of other experts than the loss.

    first forward       indices = topk(scores)         kept, in the smallest integer dtype
    recomputed forward  indices = those kept           values = scores.gather(indices) in both, as autograd saves them

Every top-k of a block is replayed: a router limited to groups has several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.models.module_sources import module_sources

_TOP_K = (torch.topk, torch.Tensor.topk)
IndexSource = Callable[[Tensor, int, Callable[[], Tensor]], Tensor]  # of scores, a dimension, and the top-k itself


def chooses(block: nn.Module) -> bool:
    """Whether the code of a block's modules contains a top-k; a mode on every operator would slow other blocks."""
    texts = module_sources(type(module) for module in block.modules())
    return texts is None or any("topk" in text for text in texts)


class Choices:
    """The indices that the top-k operators of one forward of a block have chosen, in order."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def recorded(self) -> AbstractContextManager[None]:
        """Around the first forward."""
        return _choosing(self._record)

    def replayed(self) -> AbstractContextManager[None]:
        """Around a recomputed forward; each use starts with the first choice."""
        return _choosing(_Replay(self._kept))

    def _record(self, scores: Tensor, dim: int, choose: Callable[[], Tensor]) -> Tensor:
        indices, size = choose(), scores.shape[dim]
        self._kept.append(indices.to(torch.int16 if size <= 2**15 else torch.int32 if size <= 2**31 else torch.int64))
        return indices


class _Replay:
    """Returns the kept indices, one tensor per call."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        self._kept, self._next = kept, 0

    def __call__(self, scores: Tensor, dim: int, choose: Callable[[], Tensor]) -> Tensor:
        self._next += 1
        return self._kept[self._next - 1].long()


class _Current(threading.local):
    """The source of indices in this thread: a backward may recompute in a thread of its own."""

    indices_of: IndexSource | None = None


_current = _Current()


@contextmanager
def _choosing(source: IndexSource) -> Iterator[None]:
    before, _current.indices_of = _current.indices_of, source
    try:
        with _TopK():
            yield
    finally:
        _current.indices_of = before


class _TopK(TorchFunctionMode):
    """Top-k as `weft.choose`, and its values by `gather`.

    It has no state: a compiled block traces it, and must have the same graph in both forwards.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        scores, k, dim, largest, is_sorted = _arguments(*args, **kwargs)
        indices = torch.ops.weft.choose(scores.detach(), k, dim, largest, is_sorted)
        return torch.return_types.topk((scores.gather(dim, indices), indices))


def _arguments(
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    **_out: Any,
) -> tuple[Tensor, int, int, bool, bool]:
    return input, k, dim, largest, sorted


# an operator of its own: the source of indices is read when it runs, not when a compiled block is traced
@torch.library.custom_op("weft::choose", mutates_args=())
def _choose(scores: Tensor, k: int, dim: int, largest: bool, is_sorted: bool) -> Tensor:
    def choose() -> Tensor:
        return torch.topk(scores, k, dim, largest, is_sorted).indices

    return choose() if _current.indices_of is None else _current.indices_of(scores, dim, choose)


@_choose.register_fake
def _(scores: Tensor, k: int, dim: int, largest: bool, is_sorted: bool) -> Tensor:
    shape = list(scores.shape)
    shape[dim] = k
    return scores.new_empty(shape, dtype=torch.int64)
