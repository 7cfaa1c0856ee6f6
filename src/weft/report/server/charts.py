"""The charts of one run on parameter servers: curves, staleness, load of servers, time of workers, hot keys.

Of many servers or workers only the most loaded are drawn, since the others wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.chart import (
    MAX_FLAT,
    Chart,
    axis,
    byte_unit,
    curve_chart,
    log_or_zero,
    mark_steps,
    new_figure,
    points_of,
    stack_figure,
    stack_legend,
)
from weft.report.curves import draw_loss, draw_throughput
from weft.report.facts import counted
from weft.report.fields import number, table
from weft.report.folder import ServerFolder, ServerStep
from weft.report.palette import light
from weft.report.server.facts import staleness_bound, staleness_counts
from weft.report.server.load import HotKey, ServerLoad, WorkerLoad, imbalance, slowest, waiting_share

MAX_BARS = 64
MAX_BINS = 120
MIN_AXIS = 7  # units: else the one bar of a sync run fills the chart
MAX_TABLES = 8  # in a stack; the others are one piece


def draw_curves(folder: ServerFolder) -> list[Chart | None]:
    """The curves over steps, the loss first."""
    steps = folder.metrics.steps
    return [
        draw_loss(steps, resumed=folder.metrics.resumed_after, over="samples"),
        draw_auc(steps),
        draw_throughput(steps, of="samples", by="workers"),
        draw_staleness(steps),
        draw_waiting(steps),
    ]


def draw_auc(steps: Sequence[ServerStep]) -> Chart | None:
    points = points_of(steps, "auc")
    if not points:
        return None
    step, best = max(points, key=lambda point: point[1])
    caption = f"On held-out samples: last {points[-1][1]:.4f}, best {best:.4f} at step {step:,.0f}."
    line = {"mode": "lines+markers", "line": {"dash": "dot"}}
    return curve_chart(steps, points, key="auc", title="AUC", unit="AUC", colour="orange", caption=caption, line=line)


def draw_staleness(steps: Sequence[ServerStep]) -> Chart | None:
    """None where every gradient was fresh: the histogram shows that."""
    points = points_of(steps, "staleness_mean")
    if not any(y for _, y in points):
        return None
    step, top = max(points, key=lambda point: point[1])
    caption = f"Units applied between a pull and its push, mean of a step; largest {top:.3g} at step {step:,.0f}."
    return curve_chart(
        steps,
        points,
        key="staleness-steps",
        title="Staleness",
        unit="staleness (units)",
        colour="purple",
        caption=caption,
        line={"width": 1.4},
        y_axis={"rangemode": "tozero"},
    )


def draw_waiting(steps: Sequence[ServerStep]) -> Chart | None:
    points = points_of(steps, "wait_s")
    if not any(y for _, y in points):
        return None
    step, top = max(points, key=lambda point: point[1])
    y_axis = log_or_zero(points)  # the first step waits for processes to warm up
    caption = f"For work, rows and acknowledgements; longest {format_seconds(top)} at step {step:,.0f}."
    caption += " Log scale." if "type" in y_axis else ""
    return curve_chart(
        steps,
        points,
        key="waiting",
        title="Waiting of a worker",
        unit="seconds per unit",
        colour="rose",
        caption=caption,
        line={"width": 1.4},
        y_axis=y_axis,
    )


def draw_histogram(folder: ServerFolder) -> Chart | None:
    counts = staleness_counts(folder.servers)
    if not counts:
        return None
    bins, width = _binned(counts)
    bound = staleness_bound(folder)
    last = max(*bins, bound or 0, MIN_AXIS)
    x_axis = axis("staleness (units applied between a pull and its push)", showgrid=False, tickformat=",d")
    x_axis["range"] = [-0.6 * width, last + width - 0.4]
    figure = new_figure(xaxis=x_axis, yaxis=axis("pushes", rangemode="tozero", tickformat=",d"))
    figure.add(
        "bar",
        x=[left + (width - 1) / 2 for left in bins],
        y=list(bins.values()),
        width=0.92 * width,  # given: plotly would widen bars with gaps between them
        customdata=[f"{pushes / sum(counts.values()):.1%}" for pushes in bins.values()],
        hovertemplate="%{y:,d} pushes (%{customdata})<extra></extra>",
        marker={"color": light("purple"), "line": {"width": 0}},
    )
    mark_steps(figure, [bound] if bound is not None else [], note="bound")
    caption = _histogram_caption(folder, counts, bound)
    return Chart(key="staleness", title="Staleness of pushes", caption=caption, figure=figure, is_wide=True)


def draw_servers(servers: Sequence[ServerLoad]) -> list[list[Chart | None]]:
    """In pairs: rows moved and busy share; rows and bytes held."""
    moved = {
        "pulled": [server.pulled_rows_per_s or 0.0 for server in servers],
        "pushed": [server.pushed_rows_per_s or 0.0 for server in servers],
    }
    busy = {"busy": [server.busy_share or 0.0 for server in servers]}
    rows, sizes = (_by_table(servers, part) for part in (0, 1))
    unit, scale = byte_unit(max(map(sum, zip(*sizes.values(), strict=True)), default=0))
    return [
        [
            _chart(servers, moved, key="servers-moved", title="Rows moved", unit="rows / s", show=_per_second),
            _chart(
                servers,
                busy,
                key="servers-busy",
                title="Busy share",
                unit="% of the time, inside tables and the log",
                scale=0.01,
                show="{:.1%}".format,
            ),
        ],
        [
            _chart(servers, rows, key="servers-rows", title="Rows held", unit="rows", show=format_count, has_sum=True),
            _chart(
                servers,
                sizes,
                key="servers-bytes",
                title="Memory of tables",
                unit=unit,
                scale=scale,
                show=format_bytes,
                has_sum=True,
            ),
        ],
    ]


def draw_workers(workers: Sequence[WorkerLoad]) -> Chart | None:
    timed = [worker for worker in workers if worker.compute_s + worker.wait_s > 0]
    if not timed:
        return None
    last = slowest(timed)
    drawn = [timed[place] for place in _largest([worker.compute_s_per_unit for worker in timed])]
    names = [f"{worker.name} (slowest)" if worker is last else worker.name for worker in drawn]
    seconds = {"compute": [worker.compute_s for worker in drawn], "waiting": [worker.wait_s for worker in drawn]}
    return Chart(
        key="workers",
        title="Time of workers",
        caption=_workers_caption(timed, last) + _left_out(timed, drawn),
        figure=stack_figure(names, seconds, title="seconds", show=format_seconds),
        legend=stack_legend(seconds),
        is_wide=True,
    )


def draw_hot_keys(name: str, keys: Sequence[HotKey], *, of: str, place: int) -> Chart:
    drawn = keys[:MAX_FLAT]  # key names are too long for upright bars
    updates = {"updates": [key.updates for key in drawn]}
    figure = stack_figure([str(key.key) for key in drawn], updates, title="updates", show="{:,.0f}".format)
    first = keys[0]
    share = f", in {first.share:.1%} of the {of}" if first.share is not None else ""
    caption = f"The most pushed key is {first.key}: {first.updates:,.0f} updates of its row{share}."
    return Chart(key=f"hot-keys-{place}", title=f"Hot keys of {name}", caption=caption, figure=figure)


def _by_table(servers: Sequence[ServerLoad], part: int) -> dict[str, list[float]]:
    """Rows (`part` 0) or bytes (1) of each server by table; beyond MAX_TABLES the smaller tables are one entry."""
    names = dict.fromkeys(name for server in servers for name in server.tables)
    held = {name: [server.tables.get(name, (0.0, 0.0))[part] for server in servers] for name in names}
    ordered = sorted(held, key=lambda name: sum(held[name]), reverse=True)
    stack = {name: held[name] for name in ordered[:MAX_TABLES]}
    rest = ordered[MAX_TABLES:]
    if rest:
        stack[counted(len(rest), "other table")] = [sum(column) for column in zip(*map(held.get, rest), strict=True)]
    return stack


def _chart(
    servers: Sequence[ServerLoad],
    stack: dict[str, list[float]],
    *,
    key: str,
    title: str,
    unit: str,
    show: Callable[[float], str],
    scale: float = 1,
    has_sum: bool = False,
) -> Chart | None:
    """One bar per server; None where all are empty."""
    totals = [sum(column) for column in zip(*stack.values(), strict=True)]
    if not any(totals):
        return None
    drawn = _largest(totals)
    sizes = {name: [values[place] for place in drawn] for name, values in stack.items()}
    figure = stack_figure([servers[place].name for place in drawn], sizes, title=unit, scale=scale, show=show)
    ratio, top = imbalance(totals), max(totals)
    caption = f"{show(top)}."
    if ratio:
        fullest = servers[totals.index(top)].name
        caption = f"Imbalance (max / mean) {ratio:.2f}: most on {fullest}, {show(top)} at most."
        caption += f" {show(sum(totals))} in all." if has_sum else ""
    legend = stack_legend(stack) if len(stack) > 1 else ()
    return Chart(key=key, title=title, caption=caption + _left_out(totals, drawn), figure=figure, legend=legend)


def _largest(totals: Sequence[float]) -> list[int]:
    """The indices of the largest, ascending."""
    return sorted(sorted(range(len(totals)), key=lambda place: -totals[place])[:MAX_BARS])


def _left_out(found: Sequence[Any], drawn: Sequence[Any]) -> str:
    return f" The {len(drawn)} largest of {len(found):,} are drawn." if len(drawn) < len(found) else ""


def _per_second(rate: float) -> str:
    return f"{format_count(rate)}/s"


def _binned(counts: dict[int, float]) -> tuple[dict[int, float], int]:
    """Counts by the left end of bins of one width; width 1 leaves them as they are."""
    width = max(1, -(-(max(counts) + 1) // MAX_BINS))
    bins: dict[int, float] = {}
    for tau, pushes in counts.items():
        left = tau // width * width
        bins[left] = bins.get(left, 0.0) + pushes
    return bins, width


def _histogram_caption(folder: ServerFolder, counts: dict[int, float], bound: int | None) -> str:
    total = sum(counts.values())
    mean = sum(tau * pushes for tau, pushes in counts.items()) / total
    sentences = [f"Mean {mean:.2f}, largest {max(counts):,}, over {total:,.0f} pushes to servers."]
    sentences.append(f"The gate allows {bound:,} at most." if bound is not None else "There is no bound.")
    spec = table(folder.run, "server")
    workers, discount = number(spec.get("workers")), number(spec.get("discount"))
    if workers and discount and spec.get("mode") == "async" and bound != 0:
        beyond = sum(pushes for tau, pushes in counts.items() if tau > workers - 1) / total
        sentences.append(
            f"{beyond:.1%} are beyond workers - 1 = {workers - 1:.0f} and had their learning rate discounted."
        )
    return " ".join(sentences)


def _workers_caption(workers: Sequence[WorkerLoad], last: WorkerLoad | None) -> str:
    caption = (
        f"Waiting for work, rows and acknowledgements is {waiting_share(workers) or 0.0:.0%} of the workers' time."
    )
    if last is None:
        return caption
    quick = min(worker.compute_s_per_unit for worker in workers if worker.compute_s_per_unit > 0)
    slow = last.compute_s_per_unit
    return (
        f"{caption} {last.name} is the slowest: {_pace(slow)} of compute per unit, "
        f"× {slow / quick:.2f} of the quickest ({_pace(quick)})."
    )


def _pace(seconds: float) -> str:
    return f"{seconds * 1000:.3g}ms" if seconds < 1 else format_seconds(seconds)
