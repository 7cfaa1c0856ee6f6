"""`RowMemory`: room for answers, used again once nobody else has it: fresh pages cost as much as the copy into them."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]

_KEPT = 8
_SMALL = 1 << 15  # floats: what the allocator has at hand anyway


class RowMemory:
    def __init__(self) -> None:
        self._blocks: list[Rows] = []

    def rows(self, count: int, dim: int) -> Rows:
        size = count * dim
        if size < _SMALL:
            return np.empty((count, dim), np.float32)
        for place in range(len(self._blocks)):
            is_fitting = size <= self._blocks[place].size <= 2 * size
            if is_fitting and _references(self._blocks, place) == _references(_UNHELD, 0):
                return self._blocks[place][:size].reshape(count, dim)
        self._blocks = [*self._blocks[1 - _KEPT :], np.empty(size + size // 8, np.float32)]
        return self._blocks[-1][:size].reshape(count, dim)


_UNHELD = [np.empty(1, np.float32)]  # a block that nobody has


def _references(blocks: list[Rows], place: int) -> int:
    """How many there are to a block; a view that somebody has is one more.

    How many a block in a list has anyway depends on the interpreter (some borrow what they load): it is compared with
    `_UNHELD`, counted by this very line, never with a number.
    """
    return sys.getrefcount(blocks[place])
