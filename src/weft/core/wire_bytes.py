"""Bytes of a number on its way between ranks: 8-bit codes travel with one float32 scale per block.

    float32 4    bfloat16 2    float8_e4m3, int8: 1 + 4 / 256, which is 0.254 of float32

Every parameter of a message begins a block of its own: equal copies of it get equal codes, whatever else a rank sends.
Planner (`plan/dp/`) and engine (`comm/codes.py`) share the size of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

BLOCK = 256  # elements per scale; the last block of a parameter may be shorter
SCALE_BYTES = 4
CODED: tuple[Literal["float8_e4m3", "int8"], ...] = ("float8_e4m3", "int8")  # formats with scales
_PLAIN = {"float32": 4, "bfloat16": 2, "float16": 2}


def wire_bytes(name: str) -> float:
    """Mean bytes per element of large parameters in this format."""
    return number_bytes(name) + (SCALE_BYTES / BLOCK if name in CODED else 0.0)


def number_bytes(name: str) -> int:
    """Bytes of a number itself."""
    return _PLAIN.get(name, 1)


def scale_bytes(name: str) -> int:
    """Bytes that a block has besides its numbers."""
    return SCALE_BYTES if name in CODED else 0


def num_blocks(sizes: Sequence[int]) -> int:
    """Blocks of parameters of these sizes."""
    return sum(-(-size // BLOCK) for size in sizes)


def message_bytes(name: str, sizes: Sequence[int]) -> int:
    """Bytes of a message with parameters of these sizes."""
    return number_bytes(name) * sum(sizes) + scale_bytes(name) * num_blocks(sizes)
