"""Best-fit packing: pieces into as few rows as a greedy choice finds, each piece whole.

Pieces from the longest to the shortest; each goes into the fullest row that has room, of equal ones into the newest.
The result depends on the lengths and their order alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], *, room: int) -> list[list[int]]:
    """Indices of the pieces of each row; no length is above `room`."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # rows by their free positions
    free = 0  # bit r: some row has r free positions
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fits = free >> length
        if fits:
            left = length + (fits & -fits).bit_length() - 1
            row = with_room[left].pop()
            if not with_room[left]:
                free &= ~(1 << left)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > length:
            with_room[left - length].append(row)
            free |= 1 << (left - length)
    return rows
