"""The few figures a reader wants first, taken from the ledger where there is one and from the other files where not.

Every figure may be None, which means "not known", never zero. Medians, not means: the first step warms caches up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weft.core import axes
from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.core.records import StepRecord
from weft.core.units import format_bytes, format_count
from weft.report.changes import last_data_change, last_held_out_change
from weft.report.folder import RunFolder, number, table


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the head of the page says."""

    model: str
    parameters: float | None
    trainable_parameters: float | None
    strategy: str | None
    num_ranks: int | None
    device: str | None
    status: str  # finished | stopped | failed | unknown
    steps_done: int
    steps_asked: int | None
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None
    no_evaluation: str | None = None
    tokens: int
    tokens_per_s: float | None
    step_s: float | None
    peak_bytes: float | None
    elapsed_s: float | None
    num_skipped: int


def gather_facts(folder: RunFolder) -> Facts:
    """The head's figures of a folder."""
    run, model, steps = table(folder.ledger, "run"), table(folder.ledger, "model"), folder.metrics.steps
    return Facts(
        model=_model_name(folder),
        parameters=number(model.get("parameters")),
        trainable_parameters=number(model.get("trainable_parameters")),
        strategy=_text(run.get("strategy")) or _planned_strategy(folder),
        num_ranks=_num_ranks(folder),
        device=_text(run.get("device_name")) or _text(run.get("device")),
        status=_text(run.get("status")) or "unknown",
        steps_done=steps[-1].step if steps else 0,
        steps_asked=_whole(table(folder.run, "train").get("steps")),
        first_loss=next((number(step.loss) for step in steps if step.step > last_data_change(folder.changes)), None),
        final_loss=number(steps[-1].loss) if steps else None,
        eval_loss=_last(number(step.eval_loss) for step in steps if step.step > last_held_out_change(folder.changes)),
        no_evaluation=_text(run.get("no_evaluation")),
        tokens=sum(step.tokens for step in steps),
        tokens_per_s=_median(step.tokens_per_s for step in steps),
        step_s=number(table(folder.ledger, "time").get("step_s")) or _median(step.step_s for step in steps),
        peak_bytes=_peak_bytes(folder, steps),
        elapsed_s=number(run.get("elapsed_s")),
        num_skipped=sum(step.skipped for step in steps),
    )


def verdict(facts: Facts) -> str:
    """The run in one line, below its model's name; what is not known is left out."""
    size = f"{format_count(facts.parameters)} parameters" if facts.parameters else ""
    ranks = counted(facts.num_ranks, "rank") if facts.num_ranks else None
    where = [part for part in (facts.strategy, ranks, facts.device) if part]
    parts = [size, ", ".join(where), steps_phrase(facts)]
    if facts.final_loss is not None:
        parts.append(f"loss {facts.final_loss:.4g}")
    if facts.eval_loss is not None:
        parts.append(f"evaluation loss {facts.eval_loss:.4g}")
    if facts.tokens_per_s is not None:
        parts.append(f"{format_count(facts.tokens_per_s)} tokens/s")
    if facts.peak_bytes is not None:
        parts.append(f"peak {format_bytes(facts.peak_bytes)} a rank")
    return " · ".join(part for part in parts if part)


def counted(count: int, noun: str) -> str:
    """1 -> '1 step', 1200 -> '1,200 steps'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class _Steps(Protocol):
    """What facts of any kind of run say about its steps."""

    @property
    def steps_done(self) -> int: ...
    @property
    def steps_asked(self) -> int | None: ...


def steps_phrase(facts: _Steps) -> str:
    """'200 steps', or '120 of 200 steps' where the run did not come to its end."""
    if facts.steps_asked is None or facts.steps_asked == facts.steps_done:
        return counted(facts.steps_done, "step")
    return f"{facts.steps_done:,} of {facts.steps_asked:,} steps"


def _model_name(folder: RunFolder) -> str:
    spec = table(folder.run, "model")
    names = (table(folder.ledger, "model").get("name"), spec.get("type"), spec.get("path"))
    return next((name for name in names if isinstance(name, str) and name), "a model of unknown name")


def _planned_strategy(folder: RunFolder) -> str | None:
    try:
        return Plan.from_tables(folder.plan).strategy_name if folder.plan else None
    except InputError:  # a plan of another version: its strategy is then not known, and the page goes on
        return None


def _num_ranks(folder: RunFolder) -> int | None:
    told = _whole(table(folder.ledger, "run").get("num_ranks"))
    if told is not None or not folder.plan:
        return told
    ranks = 1
    for axis in axes.MESH_ORDER:
        ranks *= _whole(table(folder.plan, "mesh").get(axis, 1)) or 1
    return ranks


def _peak_bytes(folder: RunFolder, steps: Iterable[StepRecord]) -> float | None:
    told = number(table(folder.ledger, "memory").get("peak_bytes"))
    return told or max((step.peak_memory_bytes for step in steps), default=0) or None


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in map(number, values) if value]
    return statistics.median(known) if known else None


def _last(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
