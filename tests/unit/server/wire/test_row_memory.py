"""Memory for answers is used again when nobody has it, and never before: on any interpreter."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from weft.server.wire import row_memory
from weft.server.wire.row_memory import RowMemory

COUNT, DIM = 4096, 64


@pytest.mark.parametrize("more", [-1, 0, 1])  # what another interpreter's own references come to
@pytest.mark.parametrize("kept", ["whole", "slice", "row", "transposed"])
def test_a_held_view_keeps_its_block_and_a_released_one_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, more: int, kept: str
) -> None:
    count = sys.getrefcount
    monkeypatch.setattr(row_memory.sys, "getrefcount", lambda block: count(block) + more)
    memory = RowMemory()
    rows = memory.rows(COUNT, DIM)
    rows[:] = 1
    address = rows.ctypes.data
    held = {"whole": rows, "slice": rows[5:9, 1:], "row": rows[7], "transposed": rows.T}[kept]
    del rows
    for _ in range(3):
        memory.rows(COUNT, DIM)[:] = 2
    assert np.all(held == 1)
    del held
    assert memory.rows(COUNT, DIM).ctypes.data == address
    assert memory.rows(COUNT, DIM).ctypes.data == address, "the first was released at once"


def test_a_block_serves_what_is_not_much_smaller_and_few_are_kept() -> None:
    memory = RowMemory()
    first = memory.rows(COUNT, DIM).ctypes.data
    assert memory.rows(COUNT - COUNT // 4, DIM).ctypes.data == first
    assert memory.rows(2 * COUNT, DIM).ctypes.data != first
    held = [memory.rows(COUNT, DIM) for _ in range(20)]
    assert len({rows.ctypes.data for rows in held}) == 20
    assert len(memory._blocks) == 8
