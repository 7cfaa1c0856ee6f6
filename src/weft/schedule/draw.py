"""`draw_grid`: a timeline as text, one row per rank, one column per slot of time. `draw_svg` is the picture.

A cell is the kind and the micro-batch ("F3"), with a letter for the stage where a rank has several ("F3b").
A slot is the shortest action. With unequal costs the ends are rounded to slots, and every action keeps a cell.
"""

from __future__ import annotations

from weft.schedule.actions import Action, Kind
from weft.schedule.schedule import Schedule
from weft.schedule.timeline import Timeline

IDLE, CONTINUED = "·", "─"


def draw_grid(timeline: Timeline, *, columns: int | None = None) -> str:
    """The grid, wrapped at `columns` characters if given, and a legend with the idle share."""
    slot = slot_s(timeline)
    rows = [_row(timeline, rank, slot) for rank in range(timeline.schedule.num_ranks)]
    num_slots = max(map(len, rows))
    cell = max(len(text) for row in rows for text in row) + 1
    names = [f"rank {rank} " for rank in range(len(rows))]
    margin = max(map(len, names))
    per_block = num_slots if columns is None else max(1, (columns - margin) // cell)
    blocks = [
        "\n".join(
            name.ljust(margin) + _cells(row + [IDLE] * (num_slots - len(row)), cell, start, start + per_block)
            for name, row in zip(names, rows, strict=True)
        )
        for start in range(0, num_slots, per_block)
    ]
    return "\n\n".join([*blocks, _caption(timeline)]) + "\n"


def chunk_of(schedule: Schedule, action: Action) -> int:
    """The index of the action's stage among the stages of its rank."""
    return schedule.rank_to_stages[schedule.stage_to_rank[action.stage]].index(action.stage)


def label_of(schedule: Schedule, action: Action) -> str:
    text = f"{action.kind.value}{action.microbatch}"
    if schedule.num_stages == schedule.num_ranks:
        return text
    return text + chr(ord("a") + chunk_of(schedule, action) % 26)


def slot_s(timeline: Timeline) -> float:
    """The shortest forward or backward, at least 1/500 of the makespan: a tiny action must not stretch the drawing."""
    shortest_s = min(event.end_s - event.start_s for event in timeline.events() if event.action.kind is not Kind.U)
    return max(shortest_s, timeline.makespan_s / 500)


def _row(timeline: Timeline, rank: int, slot: float) -> list[str]:
    """The rank's cells; updates of zero duration have none."""
    row: list[str] = []
    for event in timeline.events_of(rank):
        if event.end_s == event.start_s:
            continue
        start = max(len(row), round((event.start_s - timeline.origin_s) / slot))
        length = max(1, round((event.end_s - timeline.origin_s) / slot) - start)
        row += [IDLE] * (start - len(row))
        row += [label_of(timeline.schedule, event.action)] + [CONTINUED] * (length - 1)
    return row


def _cells(row: list[str], width: int, start: int, stop: int) -> str:
    padded = (CONTINUED * (width - 1) + " " if text == CONTINUED else text.ljust(width) for text in row[start:stop])
    return "".join(padded).rstrip()


def _caption(timeline: Timeline) -> str:
    kinds = {event.action.kind for event in timeline.events()}
    legend = ", ".join(f"{kind} {kind.words}" for kind in Kind if kind in kinds - {Kind.U})
    return f"{timeline.schedule.name}: {legend}, {IDLE} idle ({timeline.bubble_share:.1%} of the time of all ranks)"
