"""The evaluation sets of [[data.evaluation]]: a chart of their losses, and a table with last and best values."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.records import StepRecord, perplexity_of
from weft.report.chart import Chart, Entry, add_line, label, step_figure
from weft.report.fields import number
from weft.report.markup import NOTHING, Markup, shown, table_of, text
from weft.report.palette import series_colour
from weft.report.series import Points


def draw_evaluations(steps: Sequence[StepRecord]) -> Chart | None:
    """The loss of every set over steps."""
    curves = _curves(steps)
    if not curves:
        return None
    figure = step_figure(steps, title="loss (mean over tokens)")
    legend = []
    for index, (name, points) in enumerate(curves.items()):
        colour = series_colour(index)
        add_line(figure, points, name=label(name), colour=colour, mode="lines+markers")
        legend.append(Entry(words=name, colour=colour, drawn="dots"))
    caption = " ".join(f"{name}: last {points[-1][1]:.4g}." for name, points in curves.items())
    return Chart(
        key="evaluations", title="Evaluation sets", caption=caption, figure=figure, legend=tuple(legend), is_wide=True
    )


def evaluation_table(steps: Sequence[StepRecord]) -> Markup:
    """Each set's last and best values; nothing without sets."""
    curves = _curves(steps)
    if not curves:
        return NOTHING
    best = {name: min(points, key=lambda point: point[1]) for name, points in curves.items()}
    columns = {
        "set": lambda row: text(row[0]),
        "loss": lambda row: shown(row[1][-1][1], "{:.4f}".format),
        "perplexity": lambda row: shown(perplexity_of(row[1][-1][1]), "{:.4g}".format),
        "best loss": lambda row: shown(best[row[0]][1], "{:.4f}".format),
        "at step": lambda row: shown(best[row[0]][0], "{:,.0f}".format),
    }
    return table_of(curves.items(), columns, caption="Evaluation sets, at the last evaluation")


def _curves(steps: Sequence[StepRecord]) -> dict[str, Points]:
    curves: dict[str, Points] = {}
    for step in steps:
        for name, found in (step.evaluations or {}).items():
            if (loss := number(found.loss)) is not None:
                curves.setdefault(name, []).append((step.step, loss))
    return curves
