"""The page of `weft comm bench`: time and bus bandwidth against size, a curve per algorithm, and the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.units import format_bytes
from weft.report.chart import Chart, Entry, add_line, axis, chart_grid, new_figure
from weft.report.markup import Markup, join, table_of, text
from weft.report.page import Page, PageSection, write_page
from weft.report.palette import series_colour

Row = Mapping[str, Any]


def write_comm_page(answer: Mapping[str, Any], target: Path) -> Path:
    rows, fit = answer["rows"], answer["fit"]
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    rate = f"{1 / fit['beta_s_per_byte'] / 1e9:.3g} GB/s" if fit["beta_s_per_byte"] else "no bandwidth found"
    page = Page(
        title="collectives",
        heading=f"Collectives on {rows[0]['ranks']} ranks",
        status="done",
        verdict=f"latency {fit['alpha_s'] * 1e6:.0f} µs, {rate} each way; {answer['machine']}",
        sections=[_section(name, [row for row in rows if row["collective"] == name]) for name in collectives],
    )
    return write_page(page, target, hint="choose another --out")


def _section(name: str, rows: Sequence[Row]) -> PageSection:
    charts = [
        _chart(rows, f"{name}-time", "Time", "seconds", "seconds", "Median of repeats, slowest rank; below is better."),
        _chart(rows, f"{name}-bus", "Bus bandwidth", "bus_bytes_per_s", "bytes/s", "As nccl-tests; above is better."),
    ]
    columns: dict[str, Callable[[Row], Markup]] = {
        "size": lambda row: text(format_bytes(row["bytes"])),
        "algorithm": lambda row: text(row["algorithm"]),
        "time, ms": lambda row: text(f"{row['seconds'] * 1e3:.3f}"),
        "bus bandwidth, GB/s": lambda row: text(f"{row['bus_bytes_per_s'] / 1e9:.3f}"),
        "bytes sent": lambda row: text(
            "-" if row["bytes_sent_per_rank"] is None else f"{row['bytes_sent_per_rank']:,}"
        ),
        "formula": lambda row: text(f"{row['predicted_bytes_per_rank']:,}"),
    }
    rows_table = table_of(rows, columns, caption="Bytes sent are those of the busiest rank.", numeric=(2, 3, 4, 5))
    return PageSection(key=name, title=name.replace("_", "-"), content=join([chart_grid(charts), rows_table]))


def _chart(rows: Sequence[Row], key: str, title: str, field: str, unit: str, caption: str) -> Chart:
    figure = new_figure(xaxis=axis("bytes", type="log", dtick=1), yaxis=axis(unit, type="log", dtick=1))
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    for index, name in enumerate(names):
        points = [(row["bytes"], row[field]) for row in rows if row["algorithm"] == name]
        add_line(figure, points, name=name, colour=series_colour(index), mode="lines+markers")
    legend = tuple(Entry(words=name, colour=series_colour(index)) for index, name in enumerate(names))
    return Chart(key=key, title=title, caption=caption, figure=figure, legend=legend)
