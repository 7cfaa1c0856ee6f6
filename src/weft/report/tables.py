"""The tables of the page, each a pure function of the folder: terms, traffic, dtypes, coverage, checkpoints, steps.

A table without rows says so in a sentence, so that a reader never takes "nothing recorded" for "nothing wrong".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from weft.core.agreement import GUESSED_TIMES, format_error, has_guessed_times, memory_row, time_row
from weft.core.records import StepRecord
from weft.core.terms import MemoryTerm, TimeTerm
from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.bars import SOURCES, readable, term_names
from weft.report.folder import RunFolder, number, rows, table
from weft.report.markup import ABSENT, NOTHING, Markup, chip, fold, grid, join, tag, text

NUM_SAMPLED_STEPS = 16


def memory_terms(folder: RunFolder) -> Markup:
    memory = table(folder.ledger, "memory")
    total = table(memory, "total")
    return _terms(
        {term: memory_row(table(memory, "terms", term), total=total) for term in table(memory, "terms")},
        MemoryTerm,
        caption="Memory by term",
        show=format_bytes,
        total=("in the allocator", total),
    )


def time_terms(folder: RunFolder) -> Markup:
    time, is_guessed = table(folder.ledger, "time"), has_guessed_times(folder.ledger)
    return _terms(
        {term: time_row(table(time, "terms", term), is_guessed=is_guessed) for term in table(time, "terms")},
        TimeTerm,
        caption="Time of a step by term",
        show=format_seconds,
        total=("step, median", time_row(table(time, "step"), is_guessed=is_guessed) if table(time, "step") else {}),
    )


def traffic(folder: RunFolder) -> Markup:
    """Bytes a step, by axis, with what was predicted beside them."""
    found = rows(folder.ledger, "traffic")
    sources = _sources(found)
    if not sources:
        return NOTHING
    named = ("axis", "collective", "phase")
    lines = [
        [
            *(text(row.get(key, "?")) for key in named),
            _shown(row, "count", "{:,.0f}".format),
            *(_shown(row, source) for source in sources),
            _error(row),
        ]
        for row in found
    ]
    columns = (*named, "count", *(readable(source) for source in sources), "error")
    return grid(lines, columns=columns, caption="Bytes one rank sends in a step", numeric=range(3, len(columns)))


def collectives(folder: RunFolder) -> Markup:
    found = rows(table(folder.ledger, "time"), "collectives")
    if not found:
        return NOTHING
    lines = [
        [text(row.get("axis", "?")), text(row.get("collective", "?")), _shown(row, "measured", format_seconds)]
        for row in found
    ]
    caption = "From issue to completion, overlapped or not"
    return grid(lines, columns=("axis", "collective", "a step"), caption=caption, numeric=(2,))


def remarks(folder: RunFolder) -> Markup:
    """What the ledger has to say about itself: predictions that were off, columns that are empty."""
    warned = [tag("li", text(f"✗ Prediction off: {line}."), class_="bad") for line in _texts(folder, "warnings")]
    guessed = [f"{GUESSED_TIMES[0].upper()}{GUESSED_TIMES[1:]}."] if has_guessed_times(folder.ledger) else []
    noted = [tag("li", text(line)) for line in [*guessed, *_texts(folder, "remarks")]]
    return tag("ul", *warned, *noted) if warned or noted else NOTHING


def _texts(folder: RunFolder, key: str) -> list[str]:
    found = folder.ledger.get(key)
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def dtypes(folder: RunFolder) -> Markup:
    """Asked against found, with the difference named first."""
    records = rows(folder.ledger, "dtypes")
    if not records:
        return absent("No dtypes were recorded: they are looked up after the first step.")
    wrong = [row for row in records if not dtype_ok(row)]
    if wrong:
        names = ", ".join(str(row.get("component", "?")) for row in wrong)
        verdict = tag("p", text(f"✗ Not as asked: {names}."), class_="bad")
    else:
        verdict = tag("p", text("✓ Every component found is what was asked."), class_="good")
    columns = ("component", "asked", "found", "")
    return join([verdict, grid(map(_dtype_line, records), columns=columns, caption="Dtypes of the live tensors")])


def dtype_ok(row: dict[str, Any]) -> bool:
    """Nothing found is nothing wrong, but it is shown as not seen."""
    asked = str(row.get("asked", "")).removeprefix("torch.")
    return all(dtype == asked for dtype in _found(row))


def checkpoints(folder: RunFolder) -> Markup:
    records = rows(folder.ledger, "checkpoints")
    if not records:
        return absent("No checkpoint was recorded.")
    lines = map(_checkpoint_line, records)
    return grid(lines, columns=("step", "path", "size", "time"), caption="Checkpoints written", numeric=(0, 2, 3))


def sampled_steps(steps: Sequence[StepRecord]) -> Markup:
    """A few steps in numbers, the first and the last among them: the charts for those who cannot see them."""
    if not steps:
        return NOTHING
    last = len(steps) - 1
    picked = sorted({round(index * last / (NUM_SAMPLED_STEPS - 1)) for index in range(NUM_SAMPLED_STEPS)})
    columns = ("step", "loss", "evaluation", "learning rate", "gradient norm", "tokens/s", "step time")
    table_ = grid(
        [_step_line(steps[index]) for index in picked],
        columns=columns,
        caption=f"{len(picked)} of {len(steps):,} steps; all of them are in metrics.jsonl",
        numeric=range(7),
    )
    return fold(text("Steps in numbers"), table_)


def absent(sentence: str) -> Markup:
    return tag("p", text(sentence), class_="absent")


def _terms(
    terms: dict[str, Any],
    kind: type[StrEnum],
    *,
    caption: str,
    show: Callable[[float], str],
    total: tuple[str, dict[str, Any]],
) -> Markup:
    """Predicted, dry run, measured and the error side by side; a column nobody filled is left out."""
    named = [(readable(term), table(terms, term)) for term in term_names(kind, terms)]
    sources = _sources([row for _, row in named])
    if not sources:
        return NOTHING
    has_errors = any(number(row.get("error")) is not None for _, row in named)
    lines = [
        [text(name), *(_shown(row, source, show) for source in sources), *([_error(row)] if has_errors else [])]
        for name, row in (*named, *([total] if total[1] else []))
    ]
    columns = ("term", *(readable(source) for source in sources), *(["error"] if has_errors else []))
    return grid(lines, columns=columns, caption=caption, numeric=range(1, len(columns)))


def _sources(found: Sequence[dict[str, Any]]) -> list[str]:
    return [source for source in SOURCES if any(number(row.get(source)) is not None for row in found)]


def _error(row: dict[str, Any]) -> Markup:
    """Measured against predicted."""
    value = number(row.get("error"))
    return text("–") if value is None else text(format_error(value))


def _shown(row: dict[str, Any], key: str, show: Callable[[float], str] = format_bytes) -> Markup:
    value = number(row.get(key))
    return ABSENT if value is None else text(show(value))


def _found(row: dict[str, Any]) -> list[str]:
    found = row.get("found")
    return [str(dtype).removeprefix("torch.") for dtype in found] if isinstance(found, list | tuple) else []


def _dtype_line(row: dict[str, Any]) -> list[Markup]:
    found = _found(row)
    asked = str(row.get("asked", "?")).removeprefix("torch.")
    if not found:
        mark = chip("not seen")
    else:
        mark = chip("✓ as asked", kind="good") if dtype_ok(row) else chip("✗ differs", kind="bad")
    shown = tag("code", text(", ".join(found))) if found else ABSENT
    return [text(readable(str(row.get("component", "?")))), tag("code", text(asked)), shown, mark]


def _checkpoint_line(row: dict[str, Any]) -> list[Markup]:
    step, path = _shown(row, "step", "{:,.0f}".format), tag("code", text(row.get("path", "?")))
    return [step, path, _shown(row, "bytes"), _shown(row, "seconds", format_seconds)]


def _step_line(step: StepRecord) -> list[Markup]:
    def shown(value: float | None, show: Callable[[float], str]) -> Markup:
        return text("–") if number(value) is None else text(show(value or 0.0))

    return [
        join([text(f"{step.step:,}"), text(" skipped" if step.skipped else "")]),
        text(f"{step.loss:.4f}"),
        shown(step.eval_loss, "{:.4f}".format),
        shown(step.learning_rate, "{:.3g}".format),
        shown(step.grad_norm, "{:.4g}".format),
        shown(step.tokens_per_s, format_count),
        shown(step.step_s, format_seconds),
    ]
