"""The stored rows of a frozen weight in 8 or 4 bits: codes, then one bfloat16 scale per group of a row. No torch.

    row of `columns` weights   columns x bits / 8 bytes of codes, columns / group x 2 bytes of scales

Planner and engine share these sizes.
"""

from __future__ import annotations

CODE_BITS = {"int8": 8, "nf4": 4}
GROUP, SCALE_BYTES = 64, 2
LEAST_GROUP = 8


def group_of(columns: int) -> int:
    """The weights of a row that share a scale: the largest power of two up to 64 that divides the row."""
    return min(GROUP, columns & -columns)


def is_stored_in_codes(columns: int) -> bool:
    """Whether a matrix with such rows is stored in codes: odd sizes would have a scale per few weights."""
    return group_of(columns) >= LEAST_GROUP


def row_bytes(columns: int, *, bits: int, group: int) -> int:
    return columns * bits // 8 + columns // group * SCALE_BYTES


def bytes_per_weight(columns: int, kind: str) -> float:
    """Bytes of each of the `columns` weights of a row, its scales included."""
    return row_bytes(columns, bits=CODE_BITS[kind], group=group_of(columns)) / columns
