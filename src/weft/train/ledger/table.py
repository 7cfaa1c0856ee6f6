"""The ledger's rows as a table for the terminal: predicted | dry run | measured | error. From ledger.json alone.

Errors that are noise are left out (core/agreement.py); ledger.json has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from weft.core.agreement import format_error, has_guessed_times, memory_row, time_row
from weft.core.records import OPERANDS
from weft.core.terms import TimeTerm
from weft.core.units import format_bytes, format_seconds

SIDES = ("predicted", "dry_run", "measured")
_SHOWN_TIMES = (TimeTerm.FORWARD, TimeTerm.BACKWARD, TimeTerm.FORWARD_BACKWARD, TimeTerm.OPTIMIZER)

Row = dict[str, Any]


def cost_table(ledger: dict[str, Any]) -> Table:
    """One line per term, without empty columns."""
    lines = list(_lines(ledger))
    sides = [side for side in SIDES if any(row.get(side) is not None for _, row, _ in lines)]
    table = Table(title="cost of a step, by term", title_justify="left")
    table.add_column("term")
    for side in sides:
        table.add_column(side.replace("_", "-"), justify="right")
    table.add_column("error", justify="right")
    for name, row, show in lines:
        table.add_row(name, *(_shown(row.get(side), show) for side in sides), _error(row))
    return table


def accuracy_table(found: dict[str, Any], *, num_rows: int = 5) -> Table:
    """The layers with the largest quantisation errors, each with its worst operand."""
    rows = found["worst"][:num_rows]
    table = Table(title=f"float8: worst {len(rows)} of {found['num_layers']} layers", title_justify="left")
    for heading in ("layer", "operand", "error", "overflow", "underflow"):
        table.add_column(heading, justify="left" if heading in ("layer", "operand") else "right")
    for row in rows:
        operand = max((one for one in OPERANDS if one in row), key=lambda one: row[one][0])
        table.add_row(row["layer"], operand, *(f"{figure:.2%}" for figure in row[operand]))
    return table


def _lines(ledger: dict[str, Any]) -> Iterator[tuple[str, Row, Callable[[float], str]]]:
    memory, time = ledger["memory"], ledger["time"]
    for term, row in memory["terms"].items():
        yield term.replace("_", " "), memory_row(row, total=memory.get("total") or {}), format_bytes
    if memory.get("total"):
        yield "total memory", memory["total"], format_bytes
    for term, row in ((ledger.get("offload") or {}).get("host") or {}).get("terms", {}).items():
        yield f"{term}, on the host", row, format_bytes
    for row in ledger["traffic"]:
        yield f"{row['axis']} {row['collective'].replace('_', '-')}, {row['phase']}", row, format_bytes
    is_guessed = has_guessed_times(ledger)
    for term in _SHOWN_TIMES:
        if term in time["terms"]:
            yield term.replace("_", " + "), time_row(time["terms"][term], is_guessed=is_guessed), format_seconds


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _error(row: Row) -> str:
    return "" if row.get("error") is None else format_error(row["error"])
