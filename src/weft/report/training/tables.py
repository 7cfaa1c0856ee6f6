"""The tables of a training's page beside costs and coverage: dtypes, checkpoints, sampled steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from weft.core.records import OPERANDS, StepRecord
from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.chart import readable
from weft.report.fields import number, rows, table, word
from weft.report.folder import TrainingFolder
from weft.report.markup import ABSENT, DASH, NOTHING, Markup, absent, chip, fold, join, shown, table_of, tag, text

NUM_SAMPLED_STEPS = 16


def dtypes(folder: TrainingFolder) -> Markup:
    """Asked against found, with the components that differ named first."""
    records = rows(folder.ledger, "dtypes")
    if not records:
        return absent("No dtypes were recorded: they are looked up after the first step.")
    wrong = [str(row.get("component", "?")) for row in records if not dtype_ok(row)]
    verdict = (
        tag("p", text(f"✗ Not as asked: {', '.join(wrong)}."), class_="bad")
        if wrong
        else tag("p", text("✓ Every component found is as asked."), class_="good")
    )
    columns = {
        "component": lambda row: text(readable(str(row.get("component", "?")))),
        "asked": lambda row: tag("code", text(str(row.get("asked", "?")).removeprefix("torch."))),
        "found": lambda row: tag("code", text(", ".join(_found(row)))) if _found(row) else ABSENT,
        "": _dtype_chip,
    }
    return join([verdict, table_of(records, columns, caption="Dtypes of the live tensors", numeric=())])


def dtype_ok(row: dict[str, Any]) -> bool:
    """A component without a tensor is not wrong; its chip reads "not seen"."""
    asked = str(row.get("asked", "")).removeprefix("torch.")
    return bool(row.get("note")) or all(dtype == asked for dtype in _found(row))


def float8_accuracy(folder: TrainingFolder) -> Markup:
    """The layers with the largest quantisation errors of float8 products, and those that fell back."""
    found = table(folder.ledger, "float8")
    records = rows(found, "worst")
    if not records:
        return NOTHING
    columns: dict[str, Callable[[dict[str, Any]], Markup]] = {
        "layer": lambda row: tag("code", text(row.get("layer", "?"))),
        "step": lambda row: shown(row.get("step"), "{:,.0f}".format),
    }
    for operand in OPERANDS:
        for at, what in enumerate(("error", "overflow", "underflow")):
            columns[f"{operand}: {what}"] = functools.partial(_share, operand, at)
    fallen = [str(row.get("layer", "?")) for row in rows(found, "unquantised")]
    sentence = f"Computed unquantised in the end: {', '.join(fallen)}." if fallen else "No layer fell back."
    caption = f"Float8: the layers with the largest errors, of {found.get('num_layers', 0):,} measured"
    return join([tag("p", text(sentence)), table_of(records, columns, caption=caption, numeric=range(1, 11))])


def _share(operand: str, at: int, row: dict[str, Any]) -> Markup:
    figures = row.get(operand)
    return shown(figures[at], "{:.2%}".format) if isinstance(figures, list) and len(figures) == 3 else DASH


def checkpoints(folder: TrainingFolder) -> Markup:
    records = rows(folder.ledger, "checkpoints")
    if not records:
        return absent("No checkpoint was recorded.")
    run = table(folder.ledger, "run")
    best, ended = table(run, "best"), word(run.get("ended"))
    sentences = [f"The run ended before its last step: {ended}."] if ended else []
    if (loss := number(best.get("loss"))) is not None:
        sentences.append(f"Best evaluation: {best.get('set')} {loss:.4f} at step {best.get('step')}.")
    columns = {
        "step": lambda row: shown(row.get("step"), "{:,.0f}".format),
        "path": lambda row: tag("code", text(row.get("path", "?"))),
        "size": lambda row: shown(row.get("bytes"), format_bytes),
        "time": lambda row: shown(row.get("seconds"), format_seconds),
    }
    written = table_of(records, columns, caption="Checkpoints written", numeric=(0, 2, 3))
    return join([*(tag("p", text(sentence)) for sentence in sentences), written])


def bad_steps(folder: TrainingFolder) -> Markup:
    """The steps whose loss was not finite or a spike, with their batches; nothing without one."""
    columns = {
        "step": lambda row: shown(row.get("step"), "{:,.0f}".format),
        "reason": lambda row: text(row.get("reason", "?")),
        "loss": lambda row: shown(row.get("loss"), "{:.4g}".format, missing=DASH),
        "gradient norm": lambda row: shown(row.get("grad_norm"), "{:.4g}".format, missing=DASH),
        "action": lambda row: text(row.get("action", "?")),
        "batch": lambda row: tag("code", text(row.get("batch", "?"))),
    }
    return table_of(folder.bad_steps, columns, caption="Bad steps", numeric=(0, 2, 3)) if folder.bad_steps else NOTHING


def written_texts(folder: TrainingFolder) -> Markup:
    """What the model wrote, the newest step first and open; nothing without samples.every."""
    by_step: dict[int, list[Markup]] = {}
    for one in folder.samples:
        prompt, written = tag("strong", text(one.get("prompt", ""))), text(one.get("text", ""))
        by_step.setdefault(int(one["step"]), []).append(tag("pre", prompt, written, class_="sample"))
    newest = max(by_step, default=0)
    return join(
        fold(text(f"after step {step:,}"), *by_step[step], is_open=step == newest)
        for step in sorted(by_step, reverse=True)
    )


def sampled_steps(steps: Sequence[StepRecord]) -> Markup:
    """A few steps in numbers, the first and the last among them, for readers who cannot see the charts."""
    if not steps:
        return NOTHING
    last = len(steps) - 1
    picked = sorted({round(index * last / (NUM_SAMPLED_STEPS - 1)) for index in range(NUM_SAMPLED_STEPS)})
    columns = {
        "step": lambda step: text(f"{step.step:,}{' skipped' if step.skipped else ''}"),
        "loss": lambda step: text(f"{step.loss:.4f}"),
        "evaluation": lambda step: shown(step.eval_loss, "{:.4f}".format, missing=DASH),
        "learning rate": lambda step: shown(step.learning_rate, "{:.3g}".format, missing=DASH),
        "gradient norm": lambda step: shown(step.grad_norm, "{:.4g}".format, missing=DASH),
        "tokens/s": lambda step: shown(step.tokens_per_s, format_count, missing=DASH),
        "step time": lambda step: shown(step.step_s, format_seconds, missing=DASH),
    }
    caption = f"{len(picked)} of {len(steps):,} steps; all of them are in metrics.jsonl"
    drawn = table_of([steps[index] for index in picked], columns, caption=caption, numeric=range(7))
    return fold(text("Steps in numbers"), drawn)


def _found(row: dict[str, Any]) -> list[str]:
    found = row.get("found")
    return [str(dtype).removeprefix("torch.") for dtype in found] if isinstance(found, list | tuple) else []


def _dtype_chip(row: dict[str, Any]) -> Markup:
    if not _found(row):
        return chip("not seen")
    return chip("✓ as asked", kind="good") if dtype_ok(row) else chip("✗ differs", kind="bad")
