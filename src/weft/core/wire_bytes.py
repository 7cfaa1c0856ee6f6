"""Bytes of a number on its way between ranks: 8-bit codes travel with one float32 scale per block.

    float32 4    bfloat16 2    float8_e4m3, int8: 1 + 4 / 256, which is 0.254 of float32

Planner (`plan/dp/`) and engine (`comm/codes.py`) share the size of a block.
"""

from __future__ import annotations

from typing import Literal

BLOCK = 256  # elements per scale; the last block of a message may be shorter
SCALE_BYTES = 4
CODED: tuple[Literal["float8_e4m3", "int8"], ...] = ("float8_e4m3", "int8")  # formats with scales
_PLAIN = {"float32": 4, "bfloat16": 2, "float16": 2}


def wire_bytes(name: str) -> float:
    """Mean bytes per element of a message in this format."""
    return float(_PLAIN[name]) if name in _PLAIN else 1 + SCALE_BYTES / BLOCK


def message_bytes(name: str, count: int) -> int:
    """Bytes of a message of `count` elements."""
    return _PLAIN[name] * count if name in _PLAIN else count + SCALE_BYTES * -(-count // BLOCK)
