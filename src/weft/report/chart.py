"""`Chart`: a plotly figure with the words around it, and the layout all charts share. The drawing is in curves, bars.

Figures are built in the light colours and carry no width: the page's script sets the theme and fits them to their box.
Text that comes from files is escaped here too, because plotly reads a small HTML of its own in labels.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go

from weft.report.palette import light
from weft.report.series import Numbered, Points

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 290  # pixels


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the legend: words, a colour of the palette, and how the series is drawn."""

    words: str
    colour: str
    drawn: Literal["line", "faint", "dots", "bar"] = "line"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure, its title, and a caption that says in words what the figure shows."""

    key: str
    title: str
    caption: str
    figure: go.Figure
    legend: tuple[Entry, ...] = ()  # in HTML: plotly's own does not wrap on a phone
    is_wide: bool = False

    @property
    def height(self) -> int:
        return int(self.figure.layout.height)

    def as_json(self) -> dict[str, Any]:
        """What the page's script hands to plotly."""
        spec: dict[str, Any] = self.figure.to_plotly_json()
        return {"data": spec["data"], "layout": {k: v for k, v in spec["layout"].items() if k != "template"}}


def label(value: object) -> str:
    """A string from a file as plotly text."""
    return html.escape(str(value), quote=False)


def new_figure(*, height: int = HEIGHT, **layout: Any) -> go.Figure:
    """An empty figure in the page's style."""
    base = {
        "template": "none",
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
    return go.Figure(layout={**base, **layout})


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


def step_figure(steps: Sequence[Numbered], *, title: str, **settings: Any) -> go.Figure:
    """A figure over steps; `settings` are the y axis's."""
    x_axis = axis("step", showgrid=False, tickformat=",d")
    if steps and steps[-1].step - steps[0].step < 8:
        x_axis["dtick"] = 1  # else a short run gets ticks at half steps, which print as the same step twice
    return new_figure(hovermode="x unified", xaxis=x_axis, yaxis=axis(title, **settings))


def add_line(figure: go.Figure, points: Points, *, name: str, colour: str, **settings: Any) -> None:
    """A curve; a single point is drawn as a dot, since a line of one point is invisible."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mode = settings.pop("mode", "lines" if len(points) > 1 else "markers")
    line = {"color": light(colour), "width": settings.pop("width", 1.8), **settings.pop("line", {})}
    marker = {"color": light(colour), "size": 8}
    figure.add_scatter(x=xs, y=ys, name=name, mode=mode, line=line, marker=marker, **settings)


def mark_steps(figure: go.Figure, steps: Sequence[int], *, note: str) -> None:
    """A dotted upright line at each of the steps."""
    if steps:
        figure.update_layout(margin_t=26)
    for step in steps:
        figure.add_vline(
            x=step,
            line={"color": light("slate"), "width": 1, "dash": "dot"},
            annotation={"text": note, "font": {"size": 11, "color": light("muted")}, "yanchor": "bottom"},
            annotation_position="top",
        )
