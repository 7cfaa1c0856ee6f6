"""The charts over steps: loss, learning rate, gradient norm, throughput, loss scale. Pure functions of the steps.

A chart without a single finite value is None: an empty frame would look like a flat zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from weft.core.records import StepRecord
from weft.core.units import format_count
from weft.report.changes import RunChange, last_data_change, last_held_out_change, split_held_out
from weft.report.chart import Chart, Entry, add_line, label, mark_steps, step_figure
from weft.report.facts import counted
from weft.report.folder import RunFolder, number, table
from weft.report.series import Numbered, Points, smooth, smooth_width, thin

LOG_RATIO = 20.0  # a curve that spans more than this is easier to read on a log axis
MAX_SCALE_TICKS = 10


def draw_curves(folder: RunFolder) -> list[Chart]:
    """Every curve that has something to show, the loss first."""
    steps = folder.metrics.steps
    resumed = resume_steps(folder)
    charts = [
        draw_loss(steps, resumed=resumed, changes=folder.changes),
        draw_learning_rate(steps),
        draw_grad_norm(steps),
        draw_throughput(steps),
        draw_loss_scale(steps),
    ]
    return [chart for chart in charts if chart is not None]


def resume_steps(folder: RunFolder) -> list[int]:
    """The steps after which the run was taken up again."""
    told = table(folder.ledger, "run").get("resumed_from")
    return sorted({*folder.metrics.resumed_after, *([told] if isinstance(told, int) else [])})


def draw_loss(
    steps: Sequence[Numbered],
    *,
    resumed: Sequence[int] = (),
    over: str = "tokens",
    changes: Sequence[RunChange] = (),
) -> Chart | None:
    """`over`: what a step's loss is the mean of. `changes`: of what is trained; they cut the held-out curve."""
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
    stretches = split_held_out(evals, changes)
    for stretch in stretches:
        add_line(figure, stretch, name="evaluation", colour="orange", mode="lines+markers", line={"dash": "dot"})
    if evals:
        legend.append(Entry(words="evaluation", colour="orange", drawn="dots"))
    marked = [change for change in changes if change.keys]
    mark_steps(figure, [step for step in resumed if step not in {change.step for change in marked}], note="resumed")
    for change in marked:
        mark_steps(figure, [change.step], note=label(f"changed: {change.note}"))
    figure.update_layout(height=360)
    compared = [point for point in losses if point[0] > last_data_change(changes)] or losses
    caption = _loss_caption(compared, stretches[-1] if stretches else [], num_missing=len(steps) - len(losses))
    if last_held_out_change(changes):
        caption += f" Held-out values before step {last_held_out_change(changes) + 1:,} are of other data."
    return Chart(key="loss", title="Loss", caption=caption, figure=figure, legend=tuple(legend), is_wide=True)


def draw_learning_rate(steps: Sequence[StepRecord]) -> Chart | None:
    points = points_of(steps, "learning_rate")
    if not points:
        return None
    figure = step_figure(steps, title="learning rate", rangemode="tozero", exponentformat="e")
    add_line(figure, thin(points), name="learning rate", colour="teal")
    top = max(points, key=lambda point: point[1])
    caption = f"Peak {top[1]:.3g} at step {top[0]:,.0f}, last {points[-1][1]:.3g}."
    return Chart(key="learning-rate", title="Learning rate", caption=caption, figure=figure)


def draw_grad_norm(steps: Sequence[StepRecord]) -> Chart | None:
    points = points_of(steps, "grad_norm")
    if not points:
        return None
    is_log = wants_log([y for _, y in points])
    # A zero has no place on a log axis; wants_log says no where there is one.
    figure = (
        step_figure(steps, title="gradient norm", type="log", dtick=1)
        if is_log
        else step_figure(steps, title="gradient norm", rangemode="tozero")
    )
    add_line(figure, thin(points), name="gradient norm", colour="purple", width=1.4)
    norms = [y for _, y in points]
    caption = f"Before clipping. Median {statistics.median(norms):.3g}, largest {max(norms):.3g}."
    bad = len(steps) - len(points)
    caption += f" Not finite in {counted(bad, 'step')}." if bad else ""
    skipped = sum(step.skipped for step in steps)
    caption += f" {counted(skipped, 'step')} skipped after an overflow." if skipped else ""
    caption += " Log scale." if is_log else ""
    return Chart(key="grad-norm", title="Gradient norm", caption=caption, figure=figure)


def draw_throughput(steps: Sequence[Numbered], *, of: str = "tokens", by: str = "ranks") -> Chart | None:
    points = [(x, y) for x, y in points_of(steps, f"{of}_per_s") if y > 0]
    if not points:
        return None
    middle = statistics.median(y for _, y in points)
    figure = step_figure(steps, title=f"{of} / s", rangemode="tozero")
    add_line(figure, thin(points), name=f"{of} / s", colour="teal", width=1.4)
    ends = [(points[0][0], middle), (points[-1][0], middle)]
    add_line(figure, ends, name="median", colour="muted", width=1.2, line={"dash": "dash"}, mode="lines")
    slowest = min(points, key=lambda point: point[1])
    caption = f"Median {format_count(middle)} {of}/s over all {by}; slowest at step {slowest[0]:,.0f}."
    return Chart(key="throughput", title="Throughput", caption=caption, figure=figure)


def draw_loss_scale(steps: Sequence[StepRecord]) -> Chart | None:
    points = points_of(steps, "loss_scale")
    if not points:
        return None
    figure = step_figure(steps, title="loss scale", type="log", **_scale_ticks(points))
    add_line(figure, thin(points), name="loss scale", colour="rose", line={"shape": "hv"})
    caption = (
        f"fp16 loss scaling; last {points[-1][1]:,.0f}, {counted(sum(step.skipped for step in steps), 'step')} skipped."
    )
    return Chart(key="loss-scale", title="Loss scale", caption=caption, figure=figure)


def points_of(steps: Sequence[Numbered], field: str) -> Points:
    """(step, value) where the value is a finite number."""
    pairs = ((step.step, number(getattr(step, field))) for step in steps)
    return [(x, y) for x, y in pairs if y is not None]


def wants_log(values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return low > 0 and high / low > LOG_RATIO


def _scale_ticks(points: Points) -> dict[str, object]:
    """Scales are powers of two: name those that occur, since a log axis would name powers of ten."""
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
