"""The tables of a run on parameter servers: servers, workers, hot keys, events, and runs beside each other.

A table without rows is a sentence, so that "nothing recorded" never reads as "nothing happened".
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.facts import counted
from weft.report.fields import number, rows
from weft.report.folder import ServerFolder, ServerStep
from weft.report.markup import DASH, NOTHING, Markup, absent, chip, fold, grid, join, shown, table_of, tag, text
from weft.report.server.facts import LOST, ServerFacts
from weft.report.server.load import HotKey, ServerLoad, WorkerLoad, slowest

MAX_OPEN = 16  # rows; a longer table is folded
MAX_EVENTS = 200
SILENT = "silent"  # a worker whose lease ran out
RETURNS = {"server lost": "server up", "worker lost": "worker joined", SILENT: "worker joined"}


def evaluations(steps: Sequence[ServerStep]) -> Markup:
    found = [step for step in steps if number(step.eval_loss) is not None or number(step.auc) is not None]
    if not found:
        return NOTHING
    columns = {
        "step": lambda step: text(f"{step.step:,}"),
        "held-out loss": lambda step: shown(step.eval_loss, "{:.4f}".format),
        "AUC": lambda step: shown(step.auc, "{:.4f}".format),
    }
    table = table_of(found, columns, caption="Evaluations", numeric=range(3))
    return fold(text("Evaluations in numbers"), table)


def servers(loads: Sequence[ServerLoad]) -> Markup:
    columns = {
        "server": lambda load: text(load.name),
        "rows": lambda load: shown(load.rows, format_count),
        "bytes": lambda load: shown(load.bytes, format_bytes),
        "pulled/s": lambda load: shown(load.pulled_rows_per_s, format_count),
        "pushed/s": lambda load: shown(load.pushed_rows_per_s, format_count),
        "busy": lambda load: shown(load.busy_share, "{:.1%}".format),
        "pulls": lambda load: shown(load.pulls, "{:,.0f}".format),
        "pushes": lambda load: shown(load.pushes, "{:,.0f}".format),
        "repeated": lambda load: shown(load.repeated, "{:,.0f}".format),
        "up": lambda load: shown(load.up_s, format_seconds),
    }
    caption = "Each server since its last start; repeated pushes were sent twice and counted once"
    return _folded_if_long(table_of(loads, columns, caption=caption), "Servers in numbers", len(loads))


def workers(loads: Sequence[WorkerLoad]) -> Markup:
    last = slowest(loads)
    columns = {
        "worker": lambda load: join([text(f"{load.name} "), chip("slowest", kind="warn") if load is last else NOTHING]),
        "units": lambda load: shown(load.units, "{:,.0f}".format),
        "compute": lambda load: shown(load.compute_s, format_seconds),
        "waiting": lambda load: shown(load.wait_s, format_seconds),
        "compute per unit (ms)": lambda load: shown(load.compute_s_per_unit * 1000, "{:.3g}".format),
        "share of waiting": lambda load: shown(load.waiting_share, "{:.0%}".format, missing=DASH),
    }
    return _folded_if_long(table_of(loads, columns, caption="Each worker"), "Workers in numbers", len(loads))


def hot_keys(name: str, keys: Sequence[HotKey], *, of: str) -> Markup:
    columns = {
        "key": lambda key: text(key.key),
        "updates": lambda key: shown(key.updates, "{:,.0f}".format),
        f"share of {of}": lambda key: shown(key.share, "{:.1%}".format),
    }
    return table_of(keys, columns, caption=f"Most pushed keys of {name}, and their share of the {of}")


def events(folder: ServerFolder) -> Markup:
    """Losses of servers and workers: when, and how long until the return."""
    found = [event for event in rows(folder.servers, "events") if isinstance(event.get("event"), str)]
    if not found:
        return absent("No events were recorded.")
    losses = [place for place, event in enumerate(found) if event.get("event") in RETURNS]
    if not losses:
        return tag("p", text("✓ No server and no worker was lost."), class_="good")
    counts = [(what, sum(found[place].get("event") == what for place in losses)) for what in (*LOST, SILENT)]
    listed = ", ".join(f"{what}: {count}" for what, count in counts if count)
    start = number(found[0].get("time"))
    lines = [_event_line(found, place, start) for place in losses[:MAX_EVENTS]]
    caption = "Losses and returns"
    caption += f"; the first {MAX_EVENTS} of {len(losses):,}" if len(losses) > MAX_EVENTS else ""
    columns = ("after", "time (UTC)", "event", "who", "back after")
    return join([tag("p", text(f"{listed}.")), grid(lines, columns=columns, caption=caption, numeric=(0, 4))])


def beside(names: Sequence[str], runs: Sequence[ServerFacts]) -> Markup:
    columns = {
        "run": lambda run: text(run[0]),
        "mode": lambda run: text(run[1].mode or "?"),
        "steps": lambda run: text(f"{run[1].steps_done:,}"),
        "loss": lambda run: shown(run[1].final_loss, "{:.4f}".format),
        "held-out loss": lambda run: shown(run[1].eval_loss, "{:.4f}".format),
        "AUC": lambda run: shown(run[1].auc, "{:.4f}".format),
        "samples/s": lambda run: shown(run[1].samples_per_s, format_count),
        "seconds": lambda run: shown(run[1].train_s, "{:.1f}".format),
        "staleness": lambda run: shown(run[1].staleness_mean, "{:.2f}".format),
    }
    caption = f"{counted(len(names), 'run')} beside each other; seconds of training"
    return table_of(zip(names, runs, strict=True), columns, caption=caption, numeric=range(2, 9))


def _event_line(found: Sequence[dict[str, Any]], place: int, start: float | None) -> list[Markup]:
    event = found[place]
    moment, what, who = number(event.get("time")), str(event.get("event")), str(event.get("who", "?"))
    back = next((number(later.get("time")) for later in found[place + 1 :] if _is_return(event, later)), None)
    return [
        text("?") if moment is None or start is None else text(f"+{format_seconds(max(0.0, moment - start))}"),
        text(_clock(moment)),
        text(what),
        text(f"server {who}" if what.startswith("server") else who),
        DASH if back is None or moment is None else text(format_seconds(max(0.0, back - moment))),
    ]


def _is_return(event: dict[str, Any], later: dict[str, Any]) -> bool:
    return later.get("event") == RETURNS[str(event.get("event"))] and later.get("who") == event.get("who")


def _clock(moment: float | None) -> str:
    try:
        return "?" if moment is None else datetime.fromtimestamp(moment, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # a number that is not a date
        return "?"


def _folded_if_long(table: Markup, summary: str, num_lines: int) -> Markup:
    return fold(text(summary), table) if num_lines > MAX_OPEN else table
