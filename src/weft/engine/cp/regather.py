"""Gathered keys and values are not kept for the backward: it gathers them again from this rank's own.

Attention saves the gathered tensors, or views of them. Inside `keeping_own`, autograd keeps the rank's own tensor and
the shape of the view instead. Blocks that are recomputed need none of this: their second forward gathers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.cp.exchange import POSITIONS, Group, begin_whole, finish_whole
from weft.engine.cp.positions import Positions


class _Again:
    """One gathered tensor. It exists again from the first use in the backward to the last."""

    def __init__(self, own: Tensor, whole: Tensor, positions: Positions, group: Group, *, repeats: int) -> None:
        self._own, self._positions, self._group, self._repeats = own.detach(), positions, group, repeats
        self._storage = whole.untyped_storage()._cdata
        self._whole: Tensor | None = None
        self._uses_left = 0

    def keep(self, saved: Tensor) -> _View | None:
        """`saved` as a view of this tensor; None if it is not."""
        if saved.untyped_storage()._cdata != self._storage:
            return None
        self._uses_left += 1
        return _View(self, tuple(saved.shape), tuple(saved.stride()), int(saved.storage_offset()))

    def use(self) -> Tensor:
        if self._whole is None:
            whole = finish_whole(begin_whole(self._own, self._group), self._positions, POSITIONS)
            self._whole = repeated(whole, self._repeats)
        whole = self._whole
        self._uses_left -= 1
        if self._uses_left == 0:
            self._whole = None
        return whole


class _View(NamedTuple):
    tensor: _Again
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def repeated(whole: Tensor, times: int) -> Tensor:
    """Key-value heads for each of their query heads."""
    return whole if times == 1 else whole.repeat_interleave(times, 1)


def keeping_own(
    pairs: Sequence[tuple[Tensor, Tensor]], positions: Positions, group: Group, *, repeats: int
) -> AbstractContextManager[Any]:
    """`pairs`: a rank's own tensor, and the whole one that attention gets."""
    found = [_Again(own, whole, positions, group, repeats=repeats) for own, whole in pairs]

    def pack(saved: Tensor) -> Any:
        views = (each.keep(saved) for each in found)
        return next((view for view in views if view is not None), saved)

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _View):
            return kept  # type: ignore[no-any-return]
        return torch.as_strided(kept.tensor.use(), kept.shape, kept.stride, kept.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
