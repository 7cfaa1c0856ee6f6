"""The charts by term: memory predicted, dry-run and measured, memory of each rank, time of a step.

Terms are disjoint, so a stack's height is the total.

The names and their order are those of core.terms; a term that this version does not know is drawn last, not dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import plotly.graph_objects as go

from weft.core.agreement import has_guessed_times, time_row
from weft.core.terms import MemoryTerm, TimeTerm
from weft.core.units import format_bytes, format_seconds
from weft.report.chart import Chart, Entry, axis, label, new_figure
from weft.report.folder import RunFolder, number, rows, table
from weft.report.palette import light, series_colour

MAX_RANKS = 64
SOURCES = ("predicted", "dry_run", "measured")
OUTSIDE = str(MemoryTerm.FRAMEWORK)  # of the tensor allocator: predicted, and never measured there
MAX_FLAT = 12  # more bars than this stand upright

_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def draw_bars(folder: RunFolder) -> list[Chart]:
    charts = [draw_sources(folder), draw_memory(folder), draw_time(folder)]
    return [chart for chart in charts if chart is not None]


def term_names(kind: type[StrEnum], found: Iterable[str]) -> list[str]:
    """The terms found, in the order of `kind`, unknown ones last."""
    present = set(found)
    known = [term.value for term in kind if term.value in present]
    return [*known, *sorted(present.difference(known))]


def readable(term: str) -> str:
    return term.replace("_", " ")


def draw_sources(folder: RunFolder) -> Chart | None:
    """Predicted, dry run and measured, a bar each; nothing where there is no second one to compare with."""
    memory = table(folder.ledger, "memory")
    terms, total = table(memory, "terms"), table(memory, "total")
    sources = [source for source in SOURCES if number(total.get(source)) is not None]
    if len(sources) < 2:
        return None
    names = term_names(MemoryTerm, (term for term in terms if term != OUTSIDE))
    sizes = {term: [number(table(terms, term).get(source)) or 0.0 for source in sources] for term in names}
    sizes = {term: values for term, values in sizes.items() if any(values)}
    unit, scale = byte_unit(max(number(total.get(source)) or 0.0 for source in sources))
    figure = stack_figure([readable(name) for name in sources], sizes, title=unit, scale=scale, show=format_bytes)
    told = [f"{readable(source)} {format_bytes(number(total.get(source)) or 0.0)}" for source in sources]
    caption = f"The worst moment of a step: {', '.join(told)}."
    return Chart(key="sources", title="Memory by term", caption=caption, figure=figure, legend=legend_of(list(sizes)))


def draw_memory(folder: RunFolder) -> Chart | None:
    ranks = [rank for rank in rows(table(folder.ledger, "memory"), "ranks") if table(rank, "terms")]
    if not ranks:
        return None
    shown = sorted(ranks, key=_peak, reverse=True)[:MAX_RANKS]
    shown.sort(key=lambda rank: number(rank.get("rank")) or 0)
    names = term_names(MemoryTerm, (term for rank in shown for term in table(rank, "terms")))
    sizes = {term: [number(table(rank, "terms").get(term)) or 0.0 for rank in shown] for term in names}
    unit, scale = byte_unit(max(map(_peak, shown)))
    bars = [str(rank.get("rank", "?")) for rank in shown]
    figure = stack_figure(bars, sizes, title=unit, scale=scale, show=format_bytes, bar_title="rank")
    caption = _memory_caption(ranks, shown)
    return Chart(key="memory", title="Memory per rank", caption=caption, figure=figure, legend=legend_of(names))


def draw_time(folder: RunFolder) -> Chart | None:
    time = table(folder.ledger, "time")
    is_guessed = has_guessed_times(folder.ledger)
    terms = {name: time_row(table(time, "terms", name), is_guessed=is_guessed) for name in table(time, "terms")}
    sources = [
        source for source in ("measured", "predicted") if any(number(t.get(source)) is not None for t in terms.values())
    ]
    if not sources:
        return None
    names = term_names(TimeTerm, terms)
    seconds = {name: [_seconds(terms, name, source) for source in sources] for name in names}
    names = [name for name in names if any(seconds[name])] or names
    seconds = {name: seconds[name] for name in names}
    figure = stack_figure(sources, seconds, title="seconds a step", scale=1, show=format_seconds)
    step_s = number(time.get("step_s"))
    median = f"Median step {format_seconds(step_s)}. " if step_s else ""
    caption = f"{median}The largest part is {readable(max(names, key=lambda name: seconds[name][0]))}."
    return Chart(key="time", title="Time of a step", caption=caption, figure=figure, legend=legend_of(names))


def _seconds(terms: Mapping[str, dict[str, Any]], name: str, source: str) -> float:
    """A term's seconds; a sum whose parts are known by themselves counts nothing."""
    has_parts = number(terms.get(TimeTerm.FORWARD, {}).get(source)) is not None
    return 0.0 if name == TimeTerm.FORWARD_BACKWARD and has_parts else number(terms[name].get(source)) or 0.0


def stack_figure(
    bars: Sequence[str],
    terms: Mapping[str, Sequence[float]],
    *,
    title: str,
    scale: float,
    show: Callable[[float], str],
    bar_title: str = "",
) -> go.Figure:
    """One bar for each of `bars`, a colour for each term; a few bars lie flat, many stand."""
    is_flat = len(bars) <= MAX_FLAT
    figure = _frame(num_bars=len(bars), is_flat=is_flat, title=title, bar_title=bar_title)
    places = [label(f"{bar_title} {bar}".strip() if is_flat else bar) for bar in bars]
    for index, (term, values) in enumerate(terms.items()):
        lengths = [value / scale for value in values]
        sides = {"x": lengths, "y": places, "orientation": "h"} if is_flat else {"x": places, "y": lengths}
        figure.add_bar(
            **sides,
            name=label(readable(term)),
            customdata=[show(value) for value in values],
            hovertemplate="%{customdata}",
            marker={"color": light(series_colour(index)), "line": {"width": 0}},
        )
    return figure


def _frame(*, num_bars: int, is_flat: bool, title: str, bar_title: str) -> go.Figure:
    values = axis(title, rangemode="tozero")
    places = axis("" if is_flat else bar_title, showgrid=False, type="category", nticks=16)
    flat = {"xaxis": values, "yaxis": {**places, "autorange": "reversed"}}
    sides = flat if is_flat else {"xaxis": places, "yaxis": values}
    height = max(150, 70 + 44 * num_bars) if is_flat else 300
    return new_figure(height=height, barmode="stack", bargap=0.32, **sides)


def legend_of(terms: Sequence[str]) -> tuple[Entry, ...]:
    return tuple(
        Entry(words=readable(term), colour=series_colour(index), drawn="bar") for index, term in enumerate(terms)
    )


def _peak(rank: dict[str, Any]) -> float:
    told = number(rank.get("step_peak_bytes")) or number(rank.get("peak_bytes"))
    return told or sum(number(size) or 0.0 for size in table(rank, "terms").values())


def byte_unit(num_bytes: float) -> tuple[str, int]:
    return next(((unit, scale) for unit, scale in _BYTE_UNITS if num_bytes >= scale), ("B", 1))


def _memory_caption(ranks: list[dict[str, Any]], shown: list[dict[str, Any]]) -> str:
    peaks = [_peak(rank) for rank in ranks]
    caption = f"Largest peak {format_bytes(max(peaks))}"
    if len(ranks) > 1:
        caption += f", smallest {format_bytes(min(peaks))}, over {len(ranks):,} ranks"
    if len(shown) < len(ranks):
        caption += f"; the {len(shown)} ranks with the largest peaks are drawn"
    return f"{caption}."
