"""Bytes, seconds and counts as people write and read them. Values elsewhere are plain bytes or seconds."""

from __future__ import annotations

import re

from weft.core.errors import BadValueError

_SIZES: dict[str, int] = {"": 1, **{f"{unit}b": 1000**power for power, unit in enumerate("kmgt", start=1)}}
_SIZES |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}


def parse_bytes(text: str, *, name: str = "the size") -> int:
    """'128GB' -> 128_000_000_000; '2TiB' -> 2_199_023_255_552; a plain number is bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _SIZES:
        raise BadValueError(f"{name} is {text!r}, not a size", hint="write 128GB, 128GiB or 2TB")
    return round(float(match[1]) * _SIZES[match[2]])


def format_bytes(num_bytes: float) -> str:
    """12_582_912 -> '12.0 MiB'."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(count: float) -> str:
    """1_500_000_000 -> '1.50 B'."""
    value = float(count)
    for unit in ("", " K", " M", " B"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if unit == "" else f"{value:.2f}{unit}"
        value /= 1000
    return f"{value:.2f} T"


def format_seconds(seconds: float) -> str:
    """75 -> '1m15s'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
