"""Costs by term: memory predicted, dry-run and measured, memory of each rank, time of a step; charts and tables.

Terms are disjoint, so the height of a stack is the total. Names and order are those of core.terms; a term that this
version does not know is drawn last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from weft.core.agreement import GUESSED_TIMES, format_error, has_guessed_times, memory_row, time_row
from weft.core.terms import MemoryTerm, TimeTerm
from weft.core.units import format_bytes, format_seconds
from weft.report.chart import Chart, byte_unit, readable, stack_figure, stack_legend
from weft.report.fields import number, rows, table
from weft.report.folder import TrainingFolder
from weft.report.markup import DASH, NOTHING, Markup, grid, join, shown, table_of, tag, text
from weft.report.training.attention_work import draw_attention_work

MAX_RANKS = 64
SOURCES = ("predicted", "dry_run", "measured")
OUTSIDE = str(MemoryTerm.FRAMEWORK)  # outside the tensor allocator: predicted, never measured there


def draw_costs(folder: TrainingFolder) -> list[Chart]:
    charts = [draw_sources(folder), draw_memory(folder), draw_time(folder), draw_attention_work(folder)]
    return [chart for chart in charts if chart is not None]


def term_names(kind: type[StrEnum], found: Iterable[str]) -> list[str]:
    """The terms found, in the order of `kind`, unknown ones last."""
    present = set(found)
    known = [term.value for term in kind if term.value in present]
    return [*known, *sorted(present.difference(known))]


def draw_sources(folder: TrainingFolder) -> Chart | None:
    """One bar each for predicted, dry run and measured; None unless two of them are known."""
    memory = table(folder.ledger, "memory")
    terms = table(memory, "terms")
    totals = {source: number(table(memory, "total").get(source)) for source in SOURCES}
    known = {source: total for source, total in totals.items() if total is not None}
    if len(known) < 2:
        return None
    names = term_names(MemoryTerm, (term for term in terms if term != OUTSIDE))
    sizes = {term: [number(table(terms, term).get(source)) or 0.0 for source in known] for term in names}
    sizes = {term: values for term, values in sizes.items() if any(values)}
    unit, scale = byte_unit(max(known.values()))
    figure = stack_figure([readable(name) for name in known], sizes, title=unit, scale=scale, show=format_bytes)
    listed = ", ".join(f"{readable(source)} {format_bytes(total)}" for source, total in known.items())
    caption = f"The peak of a step: {listed}."
    return Chart(key="sources", title="Memory by term", caption=caption, figure=figure, legend=stack_legend(sizes))


def draw_memory(folder: TrainingFolder) -> Chart | None:
    ranks = [rank for rank in rows(table(folder.ledger, "memory"), "ranks") if table(rank, "terms")]
    if not ranks:
        return None
    drawn = sorted(ranks, key=_peak, reverse=True)[:MAX_RANKS]
    drawn.sort(key=lambda rank: number(rank.get("rank")) or 0)
    names = term_names(MemoryTerm, (term for rank in drawn for term in table(rank, "terms")))
    sizes = {term: [number(table(rank, "terms").get(term)) or 0.0 for rank in drawn] for term in names}
    unit, scale = byte_unit(max(map(_peak, drawn)))
    bars = [str(rank.get("rank", "?")) for rank in drawn]
    figure = stack_figure(bars, sizes, title=unit, scale=scale, show=format_bytes, bar_title="rank")
    caption = _memory_caption([_peak(rank) for rank in ranks], num_drawn=len(drawn))
    return Chart(key="memory", title="Memory per rank", caption=caption, figure=figure, legend=stack_legend(names))


def draw_time(folder: TrainingFolder) -> Chart | None:
    terms = _time_rows(folder)
    sources = [source for source in ("measured", "predicted") if source in _sources(list(terms.values()))]
    if not sources:
        return None
    names = term_names(TimeTerm, terms)
    seconds = {name: [_seconds(terms, name, source) for source in sources] for name in names}
    names = [name for name in names if any(seconds[name])] or names
    figure = stack_figure(
        sources, {name: seconds[name] for name in names}, title="seconds per step", show=format_seconds
    )
    step_s = number(table(folder.ledger, "time").get("step_s"))
    median = f"Median step {format_seconds(step_s)}. " if step_s else ""
    caption = f"{median}The largest part is {readable(max(names, key=lambda name: seconds[name][0]))}."
    return Chart(key="time", title="Time of a step", caption=caption, figure=figure, legend=stack_legend(names))


def memory_terms(folder: TrainingFolder) -> Markup:
    memory = table(folder.ledger, "memory")
    total = table(memory, "total")
    terms = {term: memory_row(table(memory, "terms", term), total=total) for term in table(memory, "terms")}
    totals = {"in the allocator": total} if total else {}
    return _term_table(terms, MemoryTerm, totals, caption="Memory by term", show=format_bytes)


def time_terms(folder: TrainingFolder) -> Markup:
    step = table(folder.ledger, "time", "step")
    totals = {"step, median": time_row(step, is_guessed=has_guessed_times(folder.ledger))} if step else {}
    return _term_table(_time_rows(folder), TimeTerm, totals, caption="Time of a step by term", show=format_seconds)


def traffic(folder: TrainingFolder) -> Markup:
    """Bytes per step by axis: predicted, dry run, measured."""
    found = rows(folder.ledger, "traffic")
    sources = _sources(found)
    if not sources:
        return NOTHING
    named = ("axis", "collective", "phase")
    lines = [
        [
            *(text(row.get(key, "?")) for key in named),
            shown(row.get("count"), "{:,.0f}".format),
            *(shown(row.get(source), format_bytes) for source in sources),
            _error(row),
        ]
        for row in found
    ]
    columns = (*named, "count", *map(readable, sources), "error")
    return grid(lines, columns=columns, caption="Bytes that one rank sends per step", numeric=range(3, len(columns)))


def offload(folder: TrainingFolder) -> Markup:
    """Host memory by term, and copies of a step: bytes that compute hides, and bytes that it does not."""
    host = table(folder.ledger, "offload", "host")
    terms, peak = table(host, "terms"), number(host.get("process_peak_bytes"))
    if not terms:
        return NOTHING
    totals = {"in all": table(host, "total")}
    caption = "Host memory of a rank by term"
    if peak is not None:
        caption += f"; the peak of its process, with all libraries: {format_bytes(peak)}"
    columns = {
        "copies": lambda row: text(row.get("phase", "?")),
        "to the device": lambda row: shown(row.get("in_bytes"), format_bytes),
        "from it": lambda row: shown(row.get("out_bytes"), format_bytes),
        "hidden": lambda row: shown(row.get("hidden_bytes"), format_bytes),
        "exposed": lambda row: shown(row.get("exposed_bytes"), format_bytes),
        "exposed time": lambda row: shown(row.get("exposed_s"), format_seconds),
    }
    found = rows(table(folder.ledger, "offload"), "transfers")
    copies = table_of(found, columns, caption="Copies per step, predicted", numeric=range(1, 6)) if found else NOTHING
    named = {term: table(terms, term) for term in terms}
    return join([_rows_table(named, totals, caption=caption, show=format_bytes), copies])


def collectives(folder: TrainingFolder) -> Markup:
    found = rows(table(folder.ledger, "time"), "collectives")
    if not found:
        return NOTHING
    columns = {
        "axis": lambda row: text(row.get("axis", "?")),
        "collective": lambda row: text(row.get("collective", "?")),
        "per step": lambda row: shown(row.get("measured"), format_seconds),
    }
    return table_of(found, columns, caption="From issue to completion, overlapped or not", numeric=(2,))


def remarks(folder: TrainingFolder) -> Markup:
    """Remarks of the ledger: predictions that were off, columns that are empty."""
    warned = [tag("li", text(f"✗ Prediction off: {line}."), class_="bad") for line in _texts(folder, "warnings")]
    guessed = [f"{GUESSED_TIMES[0].upper()}{GUESSED_TIMES[1:]}."] if has_guessed_times(folder.ledger) else []
    noted = [tag("li", text(line)) for line in [*guessed, *_texts(folder, "remarks")]]
    return tag("ul", *warned, *noted) if warned or noted else NOTHING


def _texts(folder: TrainingFolder, key: str) -> list[str]:
    found = folder.ledger.get(key)
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def _time_rows(folder: TrainingFolder) -> dict[str, dict[str, Any]]:
    terms, is_guessed = table(folder.ledger, "time", "terms"), has_guessed_times(folder.ledger)
    return {name: time_row(table(terms, name), is_guessed=is_guessed) for name in terms}


def _seconds(terms: Mapping[str, dict[str, Any]], name: str, source: str) -> float:
    """A term's seconds; 0 for forward_backward where forward and backward are known by themselves."""
    has_parts = number(terms.get(TimeTerm.FORWARD, {}).get(source)) is not None
    return 0.0 if name == TimeTerm.FORWARD_BACKWARD and has_parts else number(terms[name].get(source)) or 0.0


def _peak(rank: dict[str, Any]) -> float:
    recorded = number(rank.get("step_peak_bytes")) or number(rank.get("peak_bytes"))
    return recorded or sum(number(size) or 0.0 for size in table(rank, "terms").values())


def _memory_caption(peaks: Sequence[float], *, num_drawn: int) -> str:
    caption = f"Largest peak {format_bytes(max(peaks))}"
    if len(peaks) > 1:
        caption += f", smallest {format_bytes(min(peaks))}, over {len(peaks):,} ranks"
    if num_drawn < len(peaks):
        caption += f"; the {num_drawn} ranks with the largest peaks are drawn"
    return f"{caption}."


def _term_table(
    terms: dict[str, Any],
    kind: type[StrEnum],
    totals: dict[str, dict[str, Any]],
    *,
    caption: str,
    show: Callable[[float], str],
) -> Markup:
    named = {readable(term): table(terms, term) for term in term_names(kind, terms)}
    return _rows_table(named, totals, caption=caption, show=show)


def _rows_table(
    named: dict[str, dict[str, Any]],
    totals: dict[str, dict[str, Any]],
    *,
    caption: str,
    show: Callable[[float], str],
) -> Markup:
    """Predicted, dry run, measured and the error side by side; columns without a number are left out."""
    sources = _sources(list(named.values()))
    if not sources:
        return NOTHING
    has_errors = any(number(row.get("error")) is not None for row in named.values())
    lines = [
        [text(name), *(shown(row.get(source), show) for source in sources), *([_error(row)] if has_errors else [])]
        for name, row in (named | totals).items()
    ]
    columns = ("term", *map(readable, sources), *(["error"] if has_errors else []))
    return grid(lines, columns=columns, caption=caption, numeric=range(1, len(columns)))


def _sources(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [source for source in SOURCES if any(number(row.get(source)) is not None for row in found)]


def _error(row: Mapping[str, Any]) -> Markup:
    """Measured against predicted."""
    return shown(row.get("error"), format_error, missing=DASH)
