"""The prediction errors that the terminal's table and the report show; smaller ones are noise.

    time      if both sides are at least 5 ms and predicted with rates of this device: the catalogue's CPU is generic
    memory    at least 1% of the peak
    traffic   always: it is counted, not estimated

ledger.json has every error, shown or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST_S = 5e-3  # noise of a busy CPU or a kernel launch is larger than this
LEAST_SHARE = 0.01  # of the peak: a smaller term is a tensor or two
MULTIPLE = 2.0  # a larger error is shown as a multiple, not as hundreds of percent

GUESSED_TIMES = (
    "times are not compared with predictions: the catalogue's CPU is a generic one (measure this one's rates into a "
    "weft.calibration.toml)"
)

Row = Mapping[str, Any]


def has_guessed_times(ledger: Row) -> bool:
    """Whether the run's seconds were predicted with another machine's figures."""
    found = ledger.get("prediction")
    if not isinstance(found, Mapping):
        return False
    return str(found.get("device", "")).upper() == "CPU" and not found.get("calibrated")


def time_row(row: Row, *, is_guessed: bool) -> dict[str, Any]:
    """A row of seconds for display, without noise."""
    if is_guessed:
        return {**row, "predicted": None, "error": None}
    sides = [row.get(side) for side in ("predicted", "measured")]
    is_noise = any(isinstance(side, int | float) and side < LEAST_S for side in sides)
    return {**row, "error": None} if is_noise else dict(row)


def memory_row(row: Row, *, total: Row) -> dict[str, Any]:
    """A row of bytes for display, without noise; `total` is the peak's row."""
    largest, peak = _largest(row), _largest(total)
    return {**row, "error": None} if largest < LEAST_SHARE * peak else dict(row)


def _largest(row: Row) -> float:
    """The larger side; 0 if a damaged ledger has neither."""
    sides = (row.get("predicted"), row.get("measured"))
    return max((side for side in sides if isinstance(side, int | float)), default=0.0)


def format_error(error: float) -> str:
    """'+3.2%', or '4.1x' instead of hundreds of percent."""
    return f"{error + 1:.1f}x" if error > MULTIPLE else f"{error:+.1%}"
