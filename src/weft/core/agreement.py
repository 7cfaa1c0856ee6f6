"""Which errors of a prediction are worth a percentage, for the terminal's table and the report alike.

    time      both sides at least 5 ms, and rates of this very device: the catalogue's CPU is nobody's
    memory    at least 1% of the peak
    traffic   always: it is counted, not estimated

ledger.json has every error, shown or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST_S = 5e-3  # a CPU that does other things, or a launch, moves a term by more than that
LEAST_SHARE = 0.01  # of the peak: below it a term is a tensor or two
MULTIPLE = 2.0  # an error beyond this says more as a multiple than as hundreds of percent

GUESSED_TIMES = (
    "times are not compared with predictions: the catalogue's CPU is not this one (a weft.calibration.toml with "
    "measured rates would make it so)"
)

Row = Mapping[str, Any]


def has_guessed_times(ledger: Row) -> bool:
    """Whether the run's seconds were predicted from figures of some other machine."""
    found = ledger.get("prediction")
    if not isinstance(found, Mapping):
        return False
    return str(found.get("device", "")).upper() == "CPU" and not found.get("calibrated")


def time_row(row: Row, *, is_guessed: bool) -> dict[str, Any]:
    """A row of seconds as it is shown."""
    if is_guessed:
        return {**row, "predicted": None, "error": None}
    sides = [row.get(side) for side in ("predicted", "measured")]
    is_noise = any(isinstance(side, int | float) and side < LEAST_S for side in sides)
    return {**row, "error": None} if is_noise else dict(row)


def memory_row(row: Row, *, total: Row) -> dict[str, Any]:
    """A row of bytes as it is shown, beside the peak that it is part of."""
    largest, peak = _largest(row), _largest(total)
    return {**row, "error": None} if largest < LEAST_SHARE * peak else dict(row)


def _largest(row: Row) -> float:
    """Of both sides; 0 where a damaged ledger has neither."""
    sides = (row.get("predicted"), row.get("measured"))
    return max((side for side in sides if isinstance(side, int | float)), default=0.0)


def format_error(error: float) -> str:
    """+3.2%, and 4.1x where percent would be in the hundreds."""
    return f"{error + 1:.1f}x" if error > MULTIPLE else f"{error:+.1%}"
