"""The charts of a training over steps: loss, learning rate, gradient norm, throughput, loss scale.

Pure functions of the steps. A chart without a single finite value is None: an empty frame would look like a flat zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from weft.core.records import StepRecord
from weft.core.units import format_count
from weft.report.changes import ReportedChange, last_data_change, last_held_out_change, split_held_out
from weft.report.chart import (
    Chart,
    Entry,
    add_line,
    curve_chart,
    label,
    log_or_zero,
    mark_steps,
    points_of,
    step_figure,
)
from weft.report.facts import counted
from weft.report.fields import table
from weft.report.folder import TrainingFolder
from weft.report.series import Numbered, Points, smooth, smooth_width, thin

MAX_SCALE_TICKS = 10


def draw_curves(folder: TrainingFolder) -> list[Chart]:
    """Every curve that has a value, the loss first."""
    steps = folder.metrics.steps
    charts = [
        draw_loss(steps, resumed=resume_steps(folder), changes=folder.changes),
        draw_learning_rate(steps),
        draw_grad_norm(steps),
        draw_throughput(steps),
        draw_loss_scale(steps),
    ]
    return [chart for chart in charts if chart is not None]


def resume_steps(folder: TrainingFolder) -> list[int]:
    """The steps after which the run was resumed."""
    recorded = table(folder.ledger, "run").get("resumed_from")
    return sorted({*folder.metrics.resumed_after, *([recorded] if isinstance(recorded, int) else [])})


def draw_loss(
    steps: Sequence[Numbered],
    *,
    resumed: Sequence[int] = (),
    over: str = "tokens",
    changes: Sequence[ReportedChange] = (),
) -> Chart | None:
    """`over`: the units that a step's loss is averaged over. `changes` of the data split the held-out curve."""
    losses, evals = points_of(steps, "loss"), points_of(steps, "eval_loss")
    if not losses and not evals:
        return None
    figure = step_figure(steps, title=f"loss (mean over {over})")
    width = smooth_width(len(losses))
    legend = []
    if losses:
        add_line(figure, thin(losses), name="training", colour="blue", opacity=0.38 if width else 1)
        legend.append(Entry(words="training", colour="blue", drawn="faint" if width else "line"))
    if width:
        name = f"smoothed over {2 * width + 1} steps"
        add_line(figure, thin(smooth(losses, width=width)), name=name, colour="blue", width=2.4)
        legend.append(Entry(words=name, colour="blue"))
    groups = split_held_out(evals, changes)
    for group in groups:
        add_line(figure, group, name="evaluation", colour="orange", mode="lines+markers", line={"dash": "dot"})
    if evals:
        legend.append(Entry(words="evaluation", colour="orange", drawn="dots"))
    marked = [change for change in changes if change.keys]
    mark_steps(figure, [step for step in resumed if step not in {change.step for change in marked}], note="resumed")
    for change in marked:
        mark_steps(figure, [change.step], note=label(f"changed: {change.note}"))
    figure.layout["height"] = 360
    compared = [point for point in losses if point[0] > last_data_change(changes)] or losses
    caption = _loss_caption(compared, groups[-1] if groups else [], num_missing=len(steps) - len(losses))
    if last_held_out_change(changes):
        caption += f" Held-out values before step {last_held_out_change(changes) + 1:,} belong to other data."
    return Chart(key="loss", title="Loss", caption=caption, figure=figure, legend=tuple(legend), is_wide=True)


def draw_learning_rate(steps: Sequence[StepRecord]) -> Chart | None:
    points = points_of(steps, "learning_rate")
    if not points:
        return None
    step, top = max(points, key=lambda point: point[1])
    return curve_chart(
        steps,
        points,
        key="learning-rate",
        title="Learning rate",
        colour="teal",
        caption=f"Peak {top:.3g} at step {step:,.0f}, last {points[-1][1]:.3g}.",
        y_axis={"rangemode": "tozero", "exponentformat": "e"},
    )


def draw_grad_norm(steps: Sequence[StepRecord]) -> Chart | None:
    points = points_of(steps, "grad_norm")
    if not points:
        return None
    norms, y_axis = [y for _, y in points], log_or_zero(points)
    caption = f"Before clipping. Median {statistics.median(norms):.3g}, largest {max(norms):.3g}."
    num_missing, num_skipped = len(steps) - len(points), sum(step.skipped for step in steps)
    caption += f" Not finite in {counted(num_missing, 'step')}." if num_missing else ""
    caption += f" {counted(num_skipped, 'step')} skipped after an overflow." if num_skipped else ""
    caption += " Log scale." if "type" in y_axis else ""
    return curve_chart(
        steps,
        points,
        key="grad-norm",
        title="Gradient norm",
        colour="purple",
        caption=caption,
        line={"width": 1.4},
        y_axis=y_axis,
    )


def draw_throughput(steps: Sequence[Numbered], *, of: str = "tokens", by: str = "ranks") -> Chart | None:
    points = [(x, y) for x, y in points_of(steps, f"{of}_per_s") if y > 0]
    if not points:
        return None
    middle = statistics.median(y for _, y in points)
    slowest = min(points, key=lambda point: point[1])
    chart = curve_chart(
        steps,
        points,
        key="throughput",
        title="Throughput",
        unit=f"{of} / s",
        colour="teal",
        caption=f"Median {format_count(middle)} {of}/s over all {by}; slowest at step {slowest[0]:,.0f}.",
        line={"width": 1.4},
        y_axis={"rangemode": "tozero"},
    )
    ends = [(points[0][0], middle), (points[-1][0], middle)]
    add_line(chart.figure, ends, name="median", colour="muted", width=1.2, line={"dash": "dash"}, mode="lines")
    return chart


def draw_loss_scale(steps: Sequence[StepRecord]) -> Chart | None:
    points = points_of(steps, "loss_scale")
    if not points:
        return None
    num_skipped = counted(sum(step.skipped for step in steps), "step")
    return curve_chart(
        steps,
        points,
        key="loss-scale",
        title="Loss scale",
        colour="rose",
        caption=f"fp16 loss scaling; last {points[-1][1]:,.0f}, {num_skipped} skipped.",
        line={"line": {"shape": "hv"}},
        y_axis={"type": "log", **_scale_ticks(points)},
    )


def _scale_ticks(points: Points) -> dict[str, object]:
    """Ticks at the scales that occur: they are powers of two, and a log axis labels powers of ten."""
    scales = sorted({y for _, y in points})
    if len(scales) > MAX_SCALE_TICKS:
        return {}
    return {"tickmode": "array", "tickvals": scales, "ticktext": [f"{scale:,.0f}" for scale in scales]}


def _loss_caption(losses: Points, evals: Points, *, num_missing: int) -> str:
    sentences = []
    if len(losses) == 1:
        sentences.append(f"One step: {losses[0][1]:.4g}.")
    elif losses:
        (first, start), (last, end) = losses[0], losses[-1]
        sentences.append(f"From {start:.4g} at step {first:,.0f} to {end:.4g} at step {last:,.0f}.")
    if evals:
        best = min(evals, key=lambda point: point[1])
        sentences.append(f"Evaluation: last {evals[-1][1]:.4g}, best {best[1]:.4g} at step {best[0]:,.0f}.")
    else:
        sentences.append("No evaluation was made.")
    sentences += [f"The loss was not finite in {counted(num_missing, 'step')}."] if num_missing else []
    return " ".join(sentences)
