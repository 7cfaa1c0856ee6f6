"""`Chart`: a figure with its title, caption and legend; the layouts, lines and bars that all charts share.

A figure is the data and layout that plotly.js draws (`report/vendor`; scatter, bar and heatmap only). Figures are built
in the light colours and carry no width: the page's script sets the theme and fits them to their box.
Text from files is escaped here too, because plotly reads a small HTML of its own in labels.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from weft.report.fields import number
from weft.report.markup import NOTHING, Markup, script_json, tag, text
from weft.report.palette import light, series_colour
from weft.report.series import Numbered, Points, thin

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 290  # pixels
MAX_FLAT = 12  # a chart with more bars than this has upright ones
LOG_RATIO = 20.0  # a curve whose maximum is more than this times its minimum gets a log axis

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
SPAN = {"xref": "x", "yref": "y domain", "y0": 0, "y1": 1}  # of a vertical line
_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Traces and layout in plotly's names; both grow while a chart is built."""

    layout: dict[str, Any]
    data: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: Literal["scatter", "bar", "heatmap"], **trace: Any) -> None:
        self.data.append({"type": kind, **trace})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the legend: words, a colour of the palette, and the look of the series."""

    words: str
    colour: str
    drawn: Literal["line", "faint", "dots", "bar"] = "line"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with its title, and a caption that states its content in words."""

    key: str
    title: str
    caption: str
    figure: Figure
    legend: tuple[Entry, ...] = ()  # in HTML: plotly's own does not wrap on a phone
    is_wide: bool = False

    @property
    def height(self) -> int:
        return int(self.figure.layout["height"])

    def as_json(self) -> dict[str, Any]:
        """The figure as the page's script passes it to plotly."""
        return {"data": self.figure.data, "layout": self.figure.layout}

    def box(self) -> Markup:
        """The chart in the page; the box keeps its height before the chart is drawn, so the page does not jump."""
        plot = tag(
            "div",
            class_="plot",
            data_figure=f"figure-{self.key}",
            role="img",
            aria_label=f"{self.title}. {self.caption}",
            style=f"min-height: {self.height}px",
        )
        spec = tag("script", script_json(self.as_json()), type="application/json", id=f"figure-{self.key}")
        return figure_box(self.title, self.caption, _legend(self.legend), plot, spec, is_wide=self.is_wide)


def chart_grid(charts: Iterable[Chart | None]) -> Markup:
    """The charts that exist, two per row; nothing where there is none."""
    boxes = [chart.box() for chart in charts if chart is not None]
    return tag("div", *boxes, class_="charts") if boxes else NOTHING


def figure_box(title: str, caption: str, legend: Markup, *content: Markup, is_wide: bool) -> Markup:
    words = tag("figcaption", tag("h3", text(title)), tag("p", text(caption)), legend)
    return tag("figure", words, *content, class_="wide" if is_wide else "half")


def label(value: object) -> str:
    """A string from a file as plotly text."""
    return html.escape(str(value), quote=False)


def new_figure(*, height: int = HEIGHT, **layout: Any) -> Figure:
    """An empty figure in the page's style."""
    base = {
        "height": height,
        "margin": {"l": 8, "r": 14, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12.5, "color": light("muted")},
        "hoverlabel": {
            "bgcolor": light("card"),
            "bordercolor": light("line"),
            "font": {"family": FONT, "color": light("ink")},
        },
        "showlegend": False,
    }
    return Figure(layout={**base, **layout})


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis in the page's style."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12}},
        "automargin": True,
        "gridcolor": light("line"),
        "linecolor": light("line"),
        "zeroline": False,
        "nticks": 7,
        **settings,
    }


def step_figure(steps: Sequence[Numbered], *, title: str, **settings: Any) -> Figure:
    """A figure over steps; `settings` belong to the y axis."""
    x_axis = axis("step", showgrid=False, tickformat=",d")
    if steps and steps[-1].step - steps[0].step < 8:
        x_axis["dtick"] = 1  # else a short run gets ticks at half steps, which print as the same step twice
    return new_figure(hovermode="x unified", xaxis=x_axis, yaxis=axis(title, **settings))


def add_line(figure: Figure, points: Points, *, name: str, colour: str, **settings: Any) -> None:
    """A curve; a single point is drawn as a dot, since a line of one point is invisible."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mode = settings.pop("mode", "lines" if len(points) > 1 else "markers")
    line = {"color": light(colour), "width": settings.pop("width", 1.8), **settings.pop("line", {})}
    marker = {"color": light(colour), "size": 8}
    figure.add("scatter", x=xs, y=ys, name=name, mode=mode, line=line, marker=marker, **settings)


def mark_steps(figure: Figure, steps: Sequence[int], *, note: str) -> None:
    """A dotted vertical line at each of the steps."""
    if not steps:
        return
    figure.layout["margin"] = {**figure.layout["margin"], "t": 26}
    line = {"color": light("slate"), "width": 1, "dash": "dot"}
    font = {"size": 11, "color": light("muted")}
    for step in steps:
        at = {"x": step, "xref": "x", "yref": "y domain"}
        figure.layout.setdefault("shapes", []).append({"type": "line", "line": line, "x0": step, "x1": step, **SPAN})
        figure.layout.setdefault("annotations", []).append(
            {"text": note, "font": font, "y": 1, "yanchor": "bottom", "showarrow": False, **at}
        )


def points_of(steps: Sequence[Numbered], field: str) -> Points:
    """(step, value) where the value is a finite number."""
    pairs = ((step.step, number(getattr(step, field))) for step in steps)
    return [(x, y) for x, y in pairs if y is not None]


def wants_log(points: Points) -> bool:
    """Whether the values span so much that a log axis reads better; never with a zero, which has no place on one."""
    low, high = min(y for _, y in points), max(y for _, y in points)
    return low > 0 and high / low > LOG_RATIO


def curve_chart(
    steps: Sequence[Numbered],
    points: Points,
    *,
    key: str,
    title: str,
    colour: str,
    caption: str,
    unit: str = "",
    line: Mapping[str, Any] = NO_SETTINGS,
    y_axis: Mapping[str, Any] = NO_SETTINGS,
) -> Chart:
    """One quantity over steps; `unit`: the title of the y axis, `line`: settings of `add_line`."""
    figure = step_figure(steps, title=unit or title.lower(), **y_axis)
    add_line(figure, thin(points), name=title.lower(), colour=colour, **line)
    return Chart(key=key, title=title, caption=caption, figure=figure)


def log_or_zero(points: Points) -> dict[str, Any]:
    """The y axis of a quantity that may span decades."""
    return {"type": "log", "dtick": 1} if wants_log(points) else {"rangemode": "tozero"}


def stack_figure(
    bars: Sequence[str],
    terms: Mapping[str, Sequence[float]],
    *,
    title: str,
    show: Callable[[float], str],
    scale: float = 1,
    bar_title: str = "",
) -> Figure:
    """Stacked bars: one bar per name of `bars`, one colour per term. A few bars are horizontal, many are upright."""
    is_flat = len(bars) <= MAX_FLAT
    values = axis(title, rangemode="tozero")
    names = axis("" if is_flat else bar_title, showgrid=False, type="category", nticks=16)
    sides = (
        {"xaxis": values, "yaxis": {**names, "autorange": "reversed"}} if is_flat else {"xaxis": names, "yaxis": values}
    )
    height = max(150, 70 + 44 * len(bars)) if is_flat else 300
    figure = new_figure(height=height, barmode="stack", bargap=0.32, **sides)
    places = [label(f"{bar_title} {bar}".strip() if is_flat else bar) for bar in bars]
    for index, (term, sizes) in enumerate(terms.items()):
        lengths = [size / scale for size in sizes]
        figure.add(
            "bar",
            **({"x": lengths, "y": places, "orientation": "h"} if is_flat else {"x": places, "y": lengths}),
            name=label(readable(term)),
            customdata=[show(size) for size in sizes],
            hovertemplate="%{customdata}",
            marker={"color": light(series_colour(index)), "line": {"width": 0}},
        )
    return figure


def stack_legend(terms: Iterable[str]) -> tuple[Entry, ...]:
    return tuple(
        Entry(words=readable(term), colour=series_colour(index), drawn="bar") for index, term in enumerate(terms)
    )


def readable(term: str) -> str:
    return term.replace("_", " ")


def byte_unit(num_bytes: float) -> tuple[str, int]:
    return next(((unit, scale) for unit, scale in _BYTE_UNITS if num_bytes >= scale), ("B", 1))


def _legend(entries: Sequence[Entry]) -> Markup:
    if not entries:
        return NOTHING
    return tag("ul", *(tag("li", _swatch(entry), text(entry.words)) for entry in entries), class_="legend")


def _swatch(entry: Entry) -> Markup:
    return tag("span", class_=f"swatch {entry.drawn}", style=f"color: var(--{entry.colour})", aria_hidden="true")
