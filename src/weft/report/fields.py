"""Fields of JSON and TOML records, read with tolerance: a missing or malformed value is None or empty, no error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_NUMBER = 1e200
MAX_COUNT = 2**53  # larger integers are not exact as JSON numbers


def table(tables: Any, *keys: str) -> dict[str, Any]:
    """The table at the path `keys`, or an empty one: the ledger of a stopped run may lack any part."""
    for key in keys:
        tables = tables.get(key) if isinstance(tables, dict) else None
    return tables if isinstance(tables, dict) else {}


def rows(tables: Any, key: str) -> list[dict[str, Any]]:
    """The tables in the list under `key`; other values are left out."""
    value = table(tables).get(key)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, else None; also None for one so large that sums of it would not be finite in JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < MAX_NUMBER else None  # false for NaN too


def count(value: Any) -> int | None:
    """A count, else None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT
    return value if is_count else None


def word(value: Any) -> str | None:
    """A string that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def last_known(values: Iterable[Any]) -> float | None:
    """The last finite number of `values`."""
    known = [value for value in map(number, values) if value is not None]
    return known[-1] if known else None
