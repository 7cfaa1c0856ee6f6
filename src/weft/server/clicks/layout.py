"""The Criteo layout of a text or parquet file: which column is the label, which are numeric, which categorical.

without a header: label, numeric fields, categorical fields, in that order, tab- or comma-separated
with one:         the columns label, I1 .. In, C1 .. Cm, in any order, others ignored
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import DataError

LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Places of the columns in a line."""

    label: int
    numeric: tuple[int, ...]
    categorical: tuple[int, ...]
    width: int | None = None  # None: at least as many as are named


def column_names(*, numeric: int, categorical: int) -> list[str]:
    return [LABEL, *(f"I{j}" for j in range(1, numeric + 1)), *(f"C{j}" for j in range(1, categorical + 1))]


def plain_columns(*, numeric: int, categorical: int) -> Columns:
    """Of a file without a header."""
    return Columns(
        label=0,
        numeric=tuple(range(1, 1 + numeric)),
        categorical=tuple(range(1 + numeric, 1 + numeric + categorical)),
        width=1 + numeric + categorical,
    )


def named_columns(header: list[str], *, numeric: int, categorical: int, path: Path) -> Columns:
    """Of a file that names its columns."""
    names = column_names(numeric=numeric, categorical=categorical)
    missing = [name for name in names if name not in header]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}",
            hint=f"data.numeric = {numeric} and data.categorical = {categorical} ask for {LABEL}, I1.., C1..",
        )
    places = [header.index(name) for name in names]
    return Columns(label=places[0], numeric=tuple(places[1 : 1 + numeric]), categorical=tuple(places[1 + numeric :]))
