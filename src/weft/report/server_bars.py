"""The bars of a run on parameter servers: staleness, load of servers, time of workers, hot keys.

A long file of servers or workers is cut to the ones that matter: those with the most, since they hold up the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.bars import MAX_FLAT, byte_unit, legend_of, stack_figure
from weft.report.chart import Chart, axis, mark_steps, new_figure
from weft.report.facts import counted
from weft.report.folder import number, table
from weft.report.palette import light
from weft.report.server_facts import staleness_bound
from weft.report.server_folder import ServerRunFolder, staleness_counts
from weft.report.server_load import HotKey, ServerLoad, WorkerLoad, imbalance, slowest, waiting_share

MAX_BARS = 64
MAX_BINS = 120
MIN_AXIS = 7  # units: else the one bar of a sync run fills the chart
MAX_TABLES = 8  # in a stack; the others are one piece


def draw_histogram(folder: ServerRunFolder) -> Chart | None:
    counts = staleness_counts(folder.figures)
    if not counts:
        return None
    bins, width = _binned(counts)
    bound = staleness_bound(folder)
    last = max(*bins, bound or 0, MIN_AXIS)
    x_axis = axis("staleness (units applied between a pull and its push)", showgrid=False, tickformat=",d")
    x_axis["range"] = [-0.6 * width, last + width - 0.4]
    figure = new_figure(xaxis=x_axis, yaxis=axis("pushes", rangemode="tozero", tickformat=",d"))
    shares = [f"{count / sum(counts.values()):.1%}" for count in bins.values()]
    figure.add_bar(
        x=[left + (width - 1) / 2 for left in bins],
        y=list(bins.values()),
        width=0.92 * width,  # told: plotly would widen bars with gaps between them
        customdata=shares,
        hovertemplate="%{y:,d} pushes (%{customdata})<extra></extra>",
        marker={"color": light("purple"), "line": {"width": 0}},
    )
    mark_steps(figure, [bound] if bound is not None else [], note="bound")
    caption = _histogram_caption(folder, counts, bound)
    return Chart(key="staleness", title="Staleness of pushes", caption=caption, figure=figure, is_wide=True)


def draw_servers(servers: Sequence[ServerLoad]) -> list[list[Chart]]:
    """In pairs: what was moved and how busy it kept them; what they hold."""
    if not servers:
        return []
    moved, held = [_draw_moved(servers), _draw_busy(servers)], [_draw_rows(servers), _draw_bytes(servers)]
    found = [[chart for chart in pair if chart is not None] for pair in (moved, held)]
    return [pair for pair in found if pair]


def draw_workers(workers: Sequence[WorkerLoad]) -> Chart | None:
    timed = [worker for worker in workers if worker.compute_s + worker.wait_s > 0]
    if not timed:
        return None
    last = slowest(timed)
    shown = sorted(timed, key=lambda worker: worker.compute_s_per_unit, reverse=True)[:MAX_BARS]
    shown = [worker for worker in timed if worker in shown][:MAX_BARS]  # in the order of the file
    names = [f"{worker.name} (slowest)" if worker is last else worker.name for worker in shown]
    seconds = {"compute": [worker.compute_s for worker in shown], "waiting": [worker.wait_s for worker in shown]}
    figure = stack_figure(names, seconds, title="seconds", scale=1, show=format_seconds)
    return Chart(
        key="workers",
        title="Time of workers",
        caption=_workers_caption(timed, last) + _cut(timed, shown),
        figure=figure,
        legend=legend_of(list(seconds)),
        is_wide=True,
    )


def draw_hot_keys(name: str, keys: Sequence[HotKey], *, of: str, place: int) -> Chart:
    shown = keys[:MAX_FLAT]  # key names are too long for bars that stand
    updates = {"updates": [key.updates for key in shown]}
    figure = stack_figure([str(key.key) for key in shown], updates, title="updates", scale=1, show="{:,.0f}".format)
    first = keys[0]
    share = f", in {first.share:.1%} of the {of}" if first.share is not None else ""
    caption = f"The most pushed key is {first.key}: {first.updates:,.0f} updates of its row{share}."
    return Chart(key=f"hot-keys-{place}", title=f"Hot keys of {name}", caption=caption, figure=figure)


def _draw_moved(servers: Sequence[ServerLoad]) -> Chart | None:
    pairs = [(server.pulled_rows_per_s, server.pushed_rows_per_s) for server in servers]
    if not any(pulled or pushed for pulled, pushed in pairs):
        return None
    totals = [(pulled or 0.0) + (pushed or 0.0) for pulled, pushed in pairs]
    shown = _largest(totals)
    rates = {
        "pulled": [pairs[place][0] or 0.0 for place in shown],
        "pushed": [pairs[place][1] or 0.0 for place in shown],
    }
    return _server_chart(
        servers, shown, rates, key="servers-moved", title="Rows moved", unit="rows / s", totals=totals, show=_a_second
    )


def _draw_busy(servers: Sequence[ServerLoad]) -> Chart | None:
    shares = [server.busy_share or 0.0 for server in servers]
    if not any(shares):
        return None
    shown = _largest(shares)
    return _server_chart(
        servers,
        shown,
        {"busy": [shares[place] for place in shown]},
        key="servers-busy",
        title="Busy share",
        unit="% of the time, inside tables and the log",
        scale=0.01,
        totals=shares,
        show="{:.1%}".format,
    )


def _draw_rows(servers: Sequence[ServerLoad]) -> Chart | None:
    return _draw_held(servers, 0, key="servers-rows", title="Rows held", show=format_count)


def _draw_bytes(servers: Sequence[ServerLoad]) -> Chart | None:
    return _draw_held(servers, 1, key="servers-bytes", title="Memory of tables", show=format_bytes)


def _draw_held(
    servers: Sequence[ServerLoad], part: int, *, key: str, title: str, show: Callable[[float], str]
) -> Chart | None:
    """By table; `part`: 0 is rows, 1 bytes."""
    totals = [sum(held[part] for held in server.tables.values()) for server in servers]
    if not any(totals):
        return None
    shown = _largest(totals)
    unit, scale = byte_unit(max(totals)) if part else ("rows", 1)
    stack = _stack_of_tables([servers[place] for place in shown], part)
    return _server_chart(
        servers, shown, stack, key=key, title=title, unit=unit, scale=scale, totals=totals, show=show, has_sum=True
    )


def _stack_of_tables(servers: Sequence[ServerLoad], part: int) -> dict[str, list[float]]:
    sizes: dict[str, float] = {}
    for server in servers:
        for name, held in server.tables.items():
            sizes[name] = sizes.get(name, 0.0) + held[part]
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    stack = {name: [server.tables.get(name, (0.0, 0.0))[part] for server in servers] for name in largest[:MAX_TABLES]}
    rest = largest[MAX_TABLES:]
    if rest:
        words = counted(len(rest), "other table")
        stack[words] = [sum(server.tables.get(name, (0.0, 0.0))[part] for name in rest) for server in servers]
    return stack


def _server_chart(
    servers: Sequence[ServerLoad],
    shown: Sequence[int],
    stack: dict[str, list[float]],
    *,
    key: str,
    title: str,
    unit: str,
    totals: Sequence[float],
    show: Callable[[float], str],
    scale: float = 1,
    has_sum: bool = False,
) -> Chart:
    names = [servers[place].name for place in shown]
    figure = stack_figure(names, stack, title=unit, scale=scale, show=show)
    told = imbalance(totals)
    balance = f"Imbalance (max / mean) {told:.2f}: most on {servers[totals.index(max(totals))].name}, " if told else ""
    caption = f"{balance}{show(max(totals))}{' at most' if told else ''}."
    caption += f" {show(sum(totals))} in all." if has_sum and told else ""
    legend = legend_of(list(stack)) if len(stack) > 1 else ()
    return Chart(key=key, title=title, caption=caption + _cut(servers, shown), figure=figure, legend=legend)


def _largest(totals: Sequence[float]) -> list[int]:
    """The places of the largest, in order of place."""
    return sorted(sorted(range(len(totals)), key=lambda place: -totals[place])[:MAX_BARS])


def _cut(found: Sequence[object], shown: Sequence[object]) -> str:
    return f" The {len(shown)} largest of {len(found):,} are drawn." if len(shown) < len(found) else ""


def _a_second(rate: float) -> str:
    return f"{format_count(rate)}/s"


def _binned(counts: dict[int, float]) -> tuple[dict[int, float], int]:
    """Counts by the left end of bins of one width; width 1 leaves them as they are."""
    width = max(1, -(-(max(counts) + 1) // MAX_BINS))
    bins: dict[int, float] = {}
    for tau, count in counts.items():
        left = tau // width * width
        bins[left] = bins.get(left, 0.0) + count
    return bins, width


def _histogram_caption(folder: ServerRunFolder, counts: dict[int, float], bound: int | None) -> str:
    total = sum(counts.values())
    mean = sum(tau * count for tau, count in counts.items()) / total
    sentences = [f"Mean {mean:.2f}, largest {max(counts):,}, over {total:,.0f} pushes to servers."]
    sentences.append(f"The gate allows {bound:,} at most." if bound is not None else "There is no bound.")
    spec = table(folder.run, "server")
    workers, discount = number(spec.get("workers")), number(spec.get("discount"))
    if workers and discount and spec.get("mode") == "async" and bound != 0:
        beyond = sum(count for tau, count in counts.items() if tau > workers - 1) / total
        sentences.append(
            f"{beyond:.1%} are beyond workers - 1 = {workers - 1:.0f} and had their learning rate discounted."
        )
    return " ".join(sentences)


def _workers_caption(workers: Sequence[WorkerLoad], last: WorkerLoad | None) -> str:
    share = waiting_share(workers)
    caption = f"Waiting for work, rows and acknowledgements is {share or 0.0:.0%} of the workers' time."
    if last is None:
        return caption
    paces = sorted(worker.compute_s_per_unit for worker in workers if worker.compute_s_per_unit > 0)
    slow, quick = last.compute_s_per_unit, paces[0]
    return (
        f"{caption} {last.name} is the slowest: {_pace(slow)} of compute a unit, "
        f"× {slow / quick:.2f} of the quickest ({_pace(quick)})."
    )


def _pace(seconds: float) -> str:
    return f"{seconds * 1000:.3g}ms" if seconds < 1 else format_seconds(seconds)
