"""`chrome_trace`: a timeline as trace events, for chrome://tracing and ui.perfetto.dev; `json.dump` the list as it is.

One process, one thread per rank; complete events ("X"), times in microseconds from the first action.
"""

from __future__ import annotations

from typing import Any

from weft.schedule.timeline import TimedAction, Timeline


def chrome_trace(timeline: Timeline) -> list[dict[str, Any]]:
    named = [_name("process_name", 0, f"pipeline {timeline.schedule.name}")]
    named += [_name("thread_name", rank, f"rank {rank}") for rank in range(timeline.schedule.num_ranks)]
    return named + [_complete(event, timeline.origin_s) for event in timeline.events()]


def _name(what: str, rank: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}


def _complete(event: TimedAction, origin_s: float) -> dict[str, Any]:
    action = event.action
    return {
        "name": str(action),
        "cat": action.kind.words.replace(" ", "_"),
        "ph": "X",
        "ts": (event.start_s - origin_s) * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "pid": 0,
        "tid": event.rank,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }
