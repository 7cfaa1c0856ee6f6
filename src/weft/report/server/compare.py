"""Curves of several runs on parameter servers beside each other, over steps and over seconds of training.

Seconds leave out evaluations and snapshots. Compare modes over seconds: over steps a mode that never waits looks no
better than one that always waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.units import format_seconds
from weft.report.chart import Chart, Entry, Figure, add_line, axis, label, new_figure, points_of, step_figure
from weft.report.folder import ServerFolder, ServerStep, train_seconds
from weft.report.palette import series_colour
from weft.report.series import Points, smooth, smooth_width, thin


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A compared quantity: a field of a step, its words, and whether higher is better."""

    field: str
    key: str
    title: str
    axis_title: str
    is_better_high: bool = False
    is_smoothed: bool = False

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.is_better_high else min(values)

    def worst(self, values: Sequence[float]) -> float:
        return min(values) if self.is_better_high else max(values)


QUANTITIES = (
    Quantity(field="loss", key="loss", title="Training loss", axis_title="loss", is_smoothed=True),
    Quantity(field="eval_loss", key="held-out", title="Held-out loss", axis_title="held-out loss"),
    Quantity(field="auc", key="auc", title="AUC", axis_title="AUC", is_better_high=True),
)


def draw_beside(names: Sequence[str], folders: Sequence[ServerFolder]) -> list[list[Chart | None]]:
    """One pair per quantity: over steps, over seconds."""
    runs = [folder.metrics.steps for folder in folders]
    return [[_over_steps(quantity, names, runs), _over_seconds(quantity, names, runs)] for quantity in QUANTITIES]


def _over_steps(quantity: Quantity, names: Sequence[str], runs: Sequence[Sequence[ServerStep]]) -> Chart | None:
    curves = [_fit(quantity, points_of(steps, quantity.field)) for steps in runs]
    longest = max(runs, key=len)
    caption = _last_values(names, curves)
    return _beside_chart(quantity, names, curves, step_figure(longest, title=quantity.axis_title), "steps", caption)


def _over_seconds(quantity: Quantity, names: Sequence[str], runs: Sequence[Sequence[ServerStep]]) -> Chart | None:
    curves = [_fit(quantity, _timed(steps, quantity.field)) for steps in runs]
    x_axis = axis("seconds of training", showgrid=False, rangemode="tozero")
    figure = new_figure(hovermode="x unified", xaxis=x_axis, yaxis=axis(quantity.axis_title))
    caption = "" if quantity.is_smoothed else _soonest(quantity, names, curves)
    untimed = [name for name, steps in zip(names, runs, strict=True) if steps and train_seconds(steps) is None]
    caption += f" Without times, and so not drawn: {', '.join(untimed)}." if untimed else ""
    return _beside_chart(quantity, names, curves, figure, "seconds", caption.strip())


def _beside_chart(
    quantity: Quantity, names: Sequence[str], curves: Sequence[Points], figure: Figure, over: str, caption: str
) -> Chart | None:
    if not any(curves):
        return None
    legend = []
    for index, (name, points) in enumerate(zip(names, curves, strict=True)):
        dots = {} if quantity.is_smoothed else {"mode": "lines+markers"}
        if points:
            add_line(figure, thin(points), name=label(name), colour=series_colour(index), **dots)
            legend.append(Entry(words=name, colour=series_colour(index)))
    if quantity.is_smoothed:
        caption = f"Smoothed. {caption}".strip()
    key, title = f"beside-{quantity.key}-{over}", f"{quantity.title} over {over}"
    return Chart(key=key, title=title, caption=caption, figure=figure, legend=tuple(legend))


def _fit(quantity: Quantity, points: Points) -> Points:
    """Smoothed, without the ends where the window is shorter: a noisy step there would decide the comparison."""
    width = smooth_width(len(points)) if quantity.is_smoothed else 0
    return smooth(points, width=width)[width:-width] if width else points


def _timed(steps: Sequence[ServerStep], field: str) -> Points:
    clock = dict(zip((step.step for step in steps), train_seconds(steps) or (), strict=False))
    return [(clock[int(x)], y) for x, y in points_of(steps, field) if int(x) in clock]


def _last_values(names: Sequence[str], curves: Sequence[Points]) -> str:
    lasts = [f"{name} {points[-1][1]:.4f}" for name, points in zip(names, curves, strict=True) if points]
    return f"Last: {', '.join(lasts)}."


def _soonest(quantity: Quantity, names: Sequence[str], curves: Sequence[Points]) -> str:
    """The time at which each run first reached the value that all of them reached."""
    drawn = [(name, points) for name, points in zip(names, curves, strict=True) if points]
    if len(drawn) < 2:
        return ""
    goal = quantity.worst([quantity.best([y for _, y in points]) for _, points in drawn])
    times = [(next(x for x, y in points if quantity.best([y, goal]) == y), name) for name, points in drawn]
    listed = ", ".join(f"{name} after {format_seconds(seconds)}" for seconds, name in sorted(times))
    return f"{goal:.4f} was reached by {listed}."
