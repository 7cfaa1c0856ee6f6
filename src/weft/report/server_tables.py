"""The tables of a run on parameter servers: servers, workers, hot keys, events, and runs beside each other.

A table without rows says so in a sentence, so that a reader never takes "nothing recorded" for "nothing happened".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.facts import counted
from weft.report.folder import number, rows
from weft.report.markup import ABSENT, NOTHING, Markup, chip, fold, grid, join, tag, text
from weft.report.server_facts import LOST, ServerFacts
from weft.report.server_folder import ServerRunFolder, ServerStep
from weft.report.server_load import HotKey, ServerLoad, WorkerLoad, slowest
from weft.report.tables import absent

MAX_OPEN = 16  # a longer table is folded
MAX_EVENTS = 200
SILENT = "silent"  # a worker whose lease ran out
COMINGS = {"server lost": "server up", "worker lost": "worker joined", SILENT: "worker joined"}


def evaluations(steps: Sequence[ServerStep]) -> Markup:
    found = [step for step in steps if number(step.eval_loss) is not None or number(step.auc) is not None]
    if not found:
        return NOTHING
    lines = [
        [text(f"{step.step:,}"), _shown(step.eval_loss, "{:.4f}".format), _shown(step.auc, "{:.4f}".format)]
        for step in found
    ]
    columns = ("step", "held-out loss", "AUC")
    return fold(text("Evaluations in numbers"), grid(lines, columns=columns, caption="Evaluations", numeric=range(3)))


def servers(loads: Sequence[ServerLoad]) -> Markup:
    lines = [
        [
            text(load.name),
            text(format_count(load.rows)),
            text(format_bytes(load.bytes)),
            _shown(load.pulled_rows_per_s, format_count),
            _shown(load.pushed_rows_per_s, format_count),
            _shown(load.busy_share, "{:.1%}".format),
            _shown(load.pulls, "{:,.0f}".format),
            _shown(load.pushes, "{:,.0f}".format),
            _shown(load.repeated, "{:,.0f}".format),
            _shown(load.up_s, format_seconds),
        ]
        for load in loads
    ]
    columns = ("server", "rows", "bytes", "pulled/s", "pushed/s", "busy", "pulls", "pushes", "repeated", "up")
    caption = "Each server, since it last came up; repeated pushes were sent twice and counted once"
    return _long(grid(lines, columns=columns, caption=caption, numeric=range(1, 10)), "Servers in numbers", len(lines))


def workers(loads: Sequence[WorkerLoad]) -> Markup:
    last = slowest(loads)
    lines = [
        [
            join([text(load.name), Markup(" "), chip("slowest", kind="warn") if load is last else NOTHING]),
            text(f"{load.units:,.0f}"),
            text(format_seconds(load.compute_s)),
            text(format_seconds(load.wait_s)),
            text(f"{load.compute_s_per_unit * 1000:.3g}"),
            _share(load.wait_s, load.compute_s + load.wait_s),
        ]
        for load in loads
    ]
    columns = ("worker", "units", "compute", "waiting", "compute a unit (ms)", "share of waiting")
    table_ = grid(lines, columns=columns, caption="Each worker", numeric=range(1, 6))
    return _long(table_, "Workers in numbers", len(lines))


def hot_keys(name: str, keys: Sequence[HotKey], *, of: str) -> Markup:
    lines = [[text(key.key), text(f"{key.updates:,.0f}"), _shown(key.share, "{:.1%}".format)] for key in keys]
    caption = f"Most pushed keys of {name}, and the share of the {of} that they are in"
    return grid(lines, columns=("key", "updates", f"share of {of}"), caption=caption, numeric=(1, 2))


def events(folder: ServerRunFolder) -> Markup:
    """What was lost, when, and when it was back."""
    found = [event for event in rows(folder.figures, "events") if isinstance(event.get("event"), str)]
    if not found:
        return absent("No events were recorded.")
    losses = [place for place, event in enumerate(found) if event.get("event") in COMINGS]
    if not losses:
        return tag("p", text("✓ No server and no worker was lost."), class_="good")
    counts = [(what, sum(found[place].get("event") == what for place in losses)) for what in (*LOST, SILENT)]
    told = ", ".join(f"{what}: {count}" for what, count in counts if count)
    start = number(found[0].get("time"))
    lines = [_event_line(found, place, start) for place in losses[:MAX_EVENTS]]
    caption = "Lost and taken up again"
    caption += f"; the first {MAX_EVENTS} of {len(losses):,}" if len(losses) > MAX_EVENTS else ""
    columns = ("after", "time (UTC)", "event", "who", "back after")
    return join([tag("p", text(f"{told}.")), grid(lines, columns=columns, caption=caption, numeric=(0, 4))])


def beside(names: Sequence[str], runs: Sequence[ServerFacts]) -> Markup:
    lines = [
        [
            text(name),
            text(facts.mode or "?"),
            text(f"{facts.steps_done:,}"),
            _shown(facts.final_loss, "{:.4f}".format),
            _shown(facts.eval_loss, "{:.4f}".format),
            _shown(facts.auc, "{:.4f}".format),
            _shown(facts.samples_per_s, format_count),
            _shown(facts.train_s, "{:.1f}".format),
            _shown(facts.staleness_mean, "{:.2f}".format),
        ]
        for name, facts in zip(names, runs, strict=True)
    ]
    columns = ("run", "mode", "steps", "loss", "held-out loss", "AUC", "samples/s", "seconds", "staleness")
    caption = f"{counted(len(lines), 'run')} beside each other; seconds of training"
    return grid(lines, columns=columns, caption=caption, numeric=range(2, 9))


def _event_line(found: Sequence[dict[str, Any]], place: int, start: float | None) -> list[Markup]:
    event = found[place]
    moment, what, who = number(event.get("time")), str(event.get("event")), str(event.get("who", "?"))
    back = next((number(later.get("time")) for later in found[place + 1 :] if _is_return(event, later)), None)
    return [
        text("?") if moment is None or start is None else text(f"+{format_seconds(max(0.0, moment - start))}"),
        text(_clock(moment)),
        text(what),
        text(f"server {who}" if what.startswith("server") else who),
        text("–") if back is None or moment is None else text(format_seconds(max(0.0, back - moment))),
    ]


def _is_return(event: dict[str, Any], later: dict[str, Any]) -> bool:
    return later.get("event") == COMINGS[str(event.get("event"))] and later.get("who") == event.get("who")


def _clock(moment: float | None) -> str:
    try:
        return "?" if moment is None else datetime.fromtimestamp(moment, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # a number that is no date
        return "?"


def _long(table_: Markup, summary: str, num_lines: int) -> Markup:
    return fold(text(summary), table_) if num_lines > MAX_OPEN else table_


def _share(part: float, whole: float) -> Markup:
    return text(f"{part / whole:.0%}") if whole > 0 else text("–")


def _shown(value: float | None, show: Callable[[float], str]) -> Markup:
    known = number(value)
    return ABSENT if known is None else text(show(known))
