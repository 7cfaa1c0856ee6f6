"""The coverage list as markup: one fold per group of equal units, and the totals above them.

Beyond MAX_ROWS rows are left out; the page states how many, and which file holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.core.records import ParameterRecord
from weft.core.units import format_bytes, format_count
from weft.report.fields import rows, table
from weft.report.folder import TrainingFolder
from weft.report.markup import NOTHING, Markup, absent, chip, fold, join, table_of, tag, text
from weft.report.training.coverage import CoverageRow, UnitGroup, group_coverage, item_bytes, parse_records

MAX_ROWS = 600


def coverage(folder: TrainingFolder) -> Markup:
    """Totals, notes on the model, and the groups."""
    records = parse_records(rows(folder.ledger, "coverage"))
    notes = _notes(folder)
    if not records:
        return join([absent("No coverage was recorded."), notes])
    groups = group_coverage(records)
    kept, num_left_out = limit_rows(groups)
    folds = [_fold(group) for group in kept]
    tail = f"{num_left_out:,} more rows are not drawn here; ledger.json holds every parameter." if num_left_out else ""
    return join([_totals(records, groups), _buffers(folder), notes, *folds, absent(tail) if tail else NOTHING])


def limit_rows(groups: Sequence[UnitGroup], *, limit: int = MAX_ROWS) -> tuple[list[UnitGroup], int]:
    """The groups with at most `limit` rows in all, and the number of rows left out."""
    kept: list[UnitGroup] = []
    room = limit
    for group in groups:
        if room > 0:
            kept.append(UnitGroup(units=group.units, rows=group.rows[:room]))
        room -= len(group.rows)
    return kept, max(0, -room)


def _notes(folder: TrainingFolder) -> Markup:
    notes = table(folder.ledger, "model").get("notes")
    items = [tag("li", text(note)) for note in notes] if isinstance(notes, list) else []
    return tag("ul", *items, class_="notes") if items else NOTHING


def _buffers(folder: TrainingFolder) -> Markup:
    """The number of buffers by state: constant, or kept equal over ranks."""
    counts = Counter(str(row.get("state", "?")) for row in rows(folder.ledger, "buffers"))
    if not counts:
        return NOTHING
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
        len(group.units) * row.count * row.record.local_elements
        for group in groups
        for row in group.rows
        if row.record.tied_to is None
    )
    return (
        f"Rank 0 holds {format_count(local)} of {format_count(total)} elements ({local / total:.1%})." if total else ""
    )


def _replicated(groups: Sequence[UnitGroup]) -> str:
    """The parameters that are replicated on every rank of the mesh, and their bytes."""
    replicated = [(len(group.units) * row.count, row) for group in groups for row in group.rows if _is_replicated(row)]
    count = sum(times for times, _ in replicated)
    if not count:
        return "None stayed replicated." if any(row.record.sharded_axes for g in groups for row in g.rows) else ""
    cost = sum(times * row.elements * (item_bytes(row.record.dtype) or 0) for times, row in replicated)
    return f"{count:,} stayed replicated, which costs each rank {format_bytes(cost)} of weights."


def _is_replicated(row: CoverageRow) -> bool:
    record = row.record
    return bool(record.replicated_axes) and not record.sharded_axes and record.tied_to is None


def _fold(group: UnitGroup) -> Markup:
    times = chip(f"{len(group.units)} equal units") if len(group.units) > 1 else NOTHING
    size = f"{group.num_parameters:,} parameters, {format_count(group.elements)} elements"
    layouts = join(dict.fromkeys(mark for row in group.rows for mark in _layout(row)))
    summary = [tag("code", text(group.label)), times, tag("span", text(size), class_="muted"), layouts]
    columns = {
        "parameter": _name,
        "shape": lambda row: text(" × ".join(map(str, row.record.shape)) or "scalar"),
        "dtype": lambda row: tag("code", text(row.record.dtype)),
        "elements": lambda row: text(f"{row.elements:,}"),
        "on rank 0": lambda row: text(f"{row.record.local_elements:,}"),
        "layout": lambda row: join([*_layout(row), *_notes_of(row)]),
    }
    body = table_of(group.rows, columns, caption=f"Unit {group.label}", numeric=(3, 4))
    return fold(tag("span", *summary, class_="unit"), body)


def _name(row: CoverageRow) -> Markup:
    name = tag("code", text(row.record.name))
    return join([name, text(f" ×{row.count}")]) if row.count > 1 else name


def _layout(row: CoverageRow) -> list[Markup]:
    record, chips = row.record, []
    if record.sharded_axes:
        chips.append(chip(f"sharded: {', '.join(record.sharded_axes)}", kind="shard"))
    if record.replicated_axes:
        chips.append(chip(f"replicated: {', '.join(record.replicated_axes)}", kind="copy"))
    if not chips:
        chips.append(chip("full, on one rank"))
    return chips + ([] if record.trainable else [chip("frozen", kind="warn")])


def _notes_of(row: CoverageRow) -> list[Markup]:
    tie = [chip(f"tied to {row.record.tied_to}")] if row.record.tied_to is not None else []
    reason = [tag("span", text(f" replicated on tp: {row.record.reason}"), class_="muted")] if row.record.reason else []
    return tie + reason
