"""The steps that torch's profiler recorded: links to the traces, and a table of the largest operators."""

from __future__ import annotations

from typing import Any

from weft.core.units import format_seconds
from weft.report.fields import number, rows
from weft.report.folder import TrainingFolder
from weft.report.markup import NOTHING, Markup, join, shown, table_of, tag, text

_VIEWERS = {
    "trace": ("https://ui.perfetto.dev", "open it in Perfetto"),
    "memory": ("https://pytorch.org/memory_viz", "drop it on memory_viz"),
}


def profile_section(folder: TrainingFolder) -> Markup:
    """Nothing without a profile."""
    if not folder.profile_files:
        return NOTHING
    return join([tag("ul", *map(_link, folder.profile_files)), _operators(folder.profile)])


def _link(file: str) -> Markup:
    address, what = _VIEWERS["memory" if "/memory-" in file else "trace"]
    return tag("li", tag("a", tag("code", text(file)), href=file), text(" : "), tag("a", text(what), href=address))


def _operators(found: dict[str, Any]) -> Markup:
    total, on_gpu = number(found.get("total_s")) or 1.0, found.get("device") == "cuda"
    columns = {
        "operator": lambda row: tag("code", text(row.get("name", "?"))),
        "calls": lambda row: shown(row.get("calls"), "{:,.0f}".format),
        "time": lambda row: shown(row.get("self_s"), format_seconds),
        "share": lambda row: shown((number(row.get("self_s")) or 0.0) / total, "{:.1%}".format),
    }
    steps = f"steps {found.get('first_step')} to {found.get('last_step')}"
    caption = f"Largest operators of rank 0, {steps}: time of the {'GPU' if on_gpu else 'host'} in each itself"
    return table_of(rows(found, "operators"), columns, caption=caption)
