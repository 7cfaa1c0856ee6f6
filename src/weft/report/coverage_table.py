"""The coverage list as markup: one fold per group of equal units, and the totals above them.

Nothing is hidden silently: where rows are cut at MAX_ROWS, the page says how many and where the rest is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.core.records import ParameterRecord
from weft.core.units import format_bytes, format_count
from weft.report.coverage import Row, UnitGroup, group_coverage, item_bytes, parse_records
from weft.report.folder import RunFolder, rows, table
from weft.report.markup import Markup, chip, fold, grid, join, tag, text
from weft.report.tables import absent

MAX_ROWS = 600

COLUMNS = ("parameter", "shape", "dtype", "elements", "on rank 0", "layout")


def coverage(folder: RunFolder) -> Markup:
    """Totals, notes of the adapter, and the groups."""
    records = parse_records(rows(folder.ledger, "coverage"))
    notes = _notes(folder)
    if not records:
        return join([absent("No coverage was recorded."), notes])
    groups = group_coverage(records)
    shown, num_left_out = cut(groups)
    folds = [_fold(group) for group in shown]
    tail = f"{num_left_out:,} more rows are not drawn here; ledger.json holds every parameter." if num_left_out else ""
    return join([_totals(records, groups), _buffers(folder), notes, *folds, absent(tail) if tail else text("")])


def cut(groups: Sequence[UnitGroup], *, limit: int = MAX_ROWS) -> tuple[list[UnitGroup], int]:
    """The groups with at most `limit` rows in all, and the number of rows left out."""
    kept: list[UnitGroup] = []
    room = limit
    for group in groups:
        if room > 0:
            kept.append(UnitGroup(units=group.units, rows=group.rows[:room]))
        room -= len(group.rows)
    return kept, max(0, -room)


def _notes(folder: RunFolder) -> Markup:
    notes = table(folder.ledger, "model").get("notes")
    items = [tag("li", text(note)) for note in notes] if isinstance(notes, list) else []
    return tag("ul", *items, class_="notes") if items else text("")


def _buffers(folder: RunFolder) -> Markup:
    """How many buffers there are, and what is done about those that forwards change."""
    counts = Counter(str(row.get("state", "?")) for row in rows(folder.ledger, "buffers"))
    if not counts:
        return text("")
    states = "; ".join(f"{count:,} {state}" for state, count in counts.most_common())
    return tag("p", text(f"{counts.total():,} buffers: {states}."))


def _totals(records: Sequence[ParameterRecord], groups: Sequence[UnitGroup]) -> Markup:
    num_units = sum(len(group.units) for group in groups)
    sentences = [f"{len(records):,} parameters in {num_units:,} units.", _held(groups), _replicated(groups)]
    tied, frozen = sum(r.tied_to is not None for r in records), sum(not r.trainable for r in records)
    sentences += [f"{tied:,} tied to another."] if tied else []
    sentences += [f"{frozen:,} frozen."] if frozen else []
    return tag("p", text(" ".join(sentence for sentence in sentences if sentence)))


def _held(groups: Sequence[UnitGroup]) -> str:
    total = sum(group.elements for group in groups)
    local = sum(
        len(group.units) * row.count * row.local_elements
        for group in groups
        for row in group.rows
        if row.tied_to is None
    )
    return (
        f"Rank 0 holds {format_count(local)} of {format_count(total)} elements ({local / total:.1%})." if total else ""
    )


def _replicated(groups: Sequence[UnitGroup]) -> str:
    """What stayed whole on every rank of the mesh, and what it costs."""
    whole = [(len(group.units) * row.count, row) for group in groups for row in group.rows if _is_whole(row)]
    count = sum(times for times, _ in whole)
    if not count:
        return "None stayed replicated." if any(row.sharded_axes for g in groups for row in g.rows) else ""
    cost = sum(times * row.elements * (item_bytes(row.dtype) or 0) for times, row in whole)
    return f"{count:,} stayed replicated, which costs each rank {format_bytes(cost)} of weights."


def _is_whole(row: Row) -> bool:
    return bool(row.replicated_axes) and not row.sharded_axes and row.tied_to is None


def _fold(group: UnitGroup) -> Markup:
    times = chip(f"{len(group.units)} equal units") if len(group.units) > 1 else text("")
    size = f"{group.num_parameters:,} parameters, {format_count(group.elements)} elements"
    layouts = join(_layouts(group.rows))
    summary = [tag("code", text(group.label)), times, tag("span", text(size), class_="muted"), layouts]
    body = grid([_line(row) for row in group.rows], columns=COLUMNS, caption=f"Unit {group.label}", numeric=(3, 4))
    return fold(tag("span", *summary, class_="unit"), body)


def _layouts(rows_: Sequence[Row]) -> list[Markup]:
    """Each layout of the group once."""
    return list(dict.fromkeys(mark for row in rows_ for mark in _marks(row)))


def _line(row: Row) -> list[Markup]:
    name = tag("code", text(row.name))
    return [
        join([name, text(f" ×{row.count}")]) if row.count > 1 else name,
        text(" × ".join(map(str, row.shape)) or "scalar"),
        tag("code", text(row.dtype)),
        text(f"{row.elements:,}"),
        text(f"{row.local_elements:,}"),
        join([*_marks(row), *_tie(row), *_reason(row)]),
    ]


def _reason(row: Row) -> list[Markup]:
    return [tag("span", text(f" whole on tp: {row.reason}"), class_="muted")] if row.reason else []


def _marks(row: Row) -> list[Markup]:
    marks = []
    if row.sharded_axes:
        marks.append(chip(f"sharded: {', '.join(row.sharded_axes)}", kind="shard"))
    if row.replicated_axes:
        marks.append(chip(f"replicated: {', '.join(row.replicated_axes)}", kind="copy"))
    if not marks:
        marks.append(chip("whole, on one rank"))
    return marks + ([] if row.trainable else [chip("frozen", kind="warn")])


def _tie(row: Row) -> list[Markup]:
    return [] if row.tied_to is None else [chip(f"tied to {row.tied_to}")]
