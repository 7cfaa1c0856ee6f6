"""Lines of metrics.jsonl as rows of numbers. Pure functions on bytes and arrays.

A value that is missing or not finite is NaN. `tokens` and `seconds` are sums over all steps so far: x axes of a chart.
A step number that does not grow means that a run was resumed: rows from that step on belong to an abandoned attempt.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.json_files import parse_json
from weft.report.fields import count, number
from weft.ui.values import VALUES

ROW = np.dtype([("step", "<i8"), ("tokens", "<f8"), ("seconds", "<f8"), *((name, "<f4") for name in VALUES)])
_PLAIN = {float, type(None)}  # an int may be too large for a float, a bool or a string is no number
MOST = 1e30  # of a value: larger ones have no place in 32 bits

Rows = NDArray[np.void]


def parse_rows(text: bytes) -> Rows:
    """The rows of whole lines; lines that are no steps are left out. Sums begin at zero."""
    steps = [found for found in _objects(text) if count(found.get("step")) is not None]
    rows = np.zeros(len(steps), dtype=ROW)
    rows["step"] = [found["step"] for found in steps]
    present: set[str] = set().union(*steps)
    for name in VALUES:
        rows[name] = _column(steps, name) if name in present else np.nan
    for name, source in (("tokens", "tokens"), ("seconds", "step_s")):
        rows[name] = np.nan_to_num(_column(steps, source))
    return rows


def fields_of(rows: Rows) -> frozenset[str]:
    """The values that any of the rows has."""
    return frozenset(name for name in VALUES if np.isfinite(rows[name]).any())


def without_repeats(rows: Rows) -> Rows:
    """The rows that no later row repeats: steps grow strictly."""
    if len(rows) < 2:
        return rows
    lowest_after = np.minimum.accumulate(rows["step"][::-1])[::-1]
    is_kept: NDArray[np.bool_] = np.append(rows["step"][:-1] < lowest_after[1:], True)
    return rows[is_kept]


def with_sums(rows: Rows, *, tokens: float = 0.0, seconds: float = 0.0) -> Rows:
    """Rows whose tokens and seconds are sums, from the sums before them on."""
    rows["tokens"] = tokens + np.cumsum(rows["tokens"])
    rows["seconds"] = seconds + np.cumsum(rows["seconds"])
    return rows


def sampled_sums(rows: Rows, *, step: int = 0, tokens: float = 0.0, seconds: float = 0.0) -> Rows:
    """Sums estimated from samples of steps: each stands for the steps since the one before."""
    spans = np.diff(rows["step"], prepend=step)
    rows["tokens"] *= spans
    rows["seconds"] *= spans
    return with_sums(rows, tokens=tokens, seconds=seconds)


def _objects(text: bytes) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # one call for all lines: several times as fast
    except (ValueError, RecursionError):
        found = list(map(_value, lines))
    return [value for value in found if isinstance(value, dict)]


def _value(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _column(steps: list[dict[str, Any]], name: str) -> NDArray[np.float64]:
    found = [step.get(name) for step in steps]
    if set(map(type, found)) <= _PLAIN:
        values = np.array(found, dtype=np.float64)  # None becomes NaN
    else:
        values = np.array([number(value) for value in found], dtype=np.float64)
    return np.where(np.abs(values) < MOST, values, np.nan)
