"""`RowMemory`: memory for answers, reused once it has no other reference: fresh pages cost as much as the copy."""

from __future__ import annotations

import sys

import numpy as np

from weft.server.arrays import Rows

_KEPT = 8
_SMALL = 1 << 15  # floats: the allocator reuses such blocks itself


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


_UNHELD = [np.empty(1, np.float32)]  # a block without other references


def _references(blocks: list[Rows], place: int) -> int:
    """References to a block; each view of it is one more.

    The number for an unused block depends on the interpreter: it is compared with that of `_UNHELD`, counted by this
    same line, never with a constant.
    """
    return sys.getrefcount(blocks[place])
