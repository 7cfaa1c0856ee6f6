"""The figures of a training for the head of its page, from the ledger or else from the other files.

None means "not known", never zero. Medians, not means: the first step warms caches up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from weft.core import axes
from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.core.units import format_bytes
from weft.report.changes import last_data_change, last_held_out_change
from weft.report.facts import Facts, common_facts, counted, model_name, one_line, phrase
from weft.report.fields import count, last_known, number, table, word
from weft.report.folder import TrainingFolder


@dataclass(frozen=True, kw_only=True)
class TrainingFacts(Facts):
    parameters: float | None
    trainable_parameters: float | None
    strategy: str | None
    num_ranks: int | None
    device: str | None
    no_evaluation: str | None
    tokens: int
    tokens_per_s: float | None
    step_s: float | None
    peak_bytes: float | None
    num_skipped: int


def gather_facts(folder: TrainingFolder) -> TrainingFacts:
    run, model, steps = table(folder.ledger, "run"), table(folder.ledger, "model"), folder.metrics.steps
    spec = table(folder.run, "model")
    peak_bytes = number(table(folder.ledger, "memory").get("peak_bytes"))
    return TrainingFacts(
        **common_facts(folder),
        model=model_name(model.get("name"), spec.get("type"), spec.get("path")),
        parameters=number(model.get("parameters")),
        trainable_parameters=number(model.get("trainable_parameters")),
        strategy=word(run.get("strategy")) or _planned_strategy(folder),
        num_ranks=_num_ranks(folder),
        device=word(run.get("device_name")) or word(run.get("device")),
        first_loss=next((number(step.loss) for step in steps if step.step > last_data_change(folder.changes)), None),
        eval_loss=last_known(step.eval_loss for step in steps if step.step > last_held_out_change(folder.changes)),
        no_evaluation=word(run.get("no_evaluation")),
        tokens=sum(step.tokens for step in steps),
        tokens_per_s=_median(step.tokens_per_s for step in steps),
        step_s=number(table(folder.ledger, "time").get("step_s")) or _median(step.step_s for step in steps),
        peak_bytes=peak_bytes or max((step.peak_memory_bytes for step in steps), default=0) or None,
        num_skipped=sum(step.skipped for step in steps),
    )


def verdict(facts: TrainingFacts) -> str:
    """The run in one line, below its model's name, without unknown figures."""
    ranks = counted(facts.num_ranks, "rank") if facts.num_ranks else None
    return one_line(
        phrase(facts.parameters or None, "{count} parameters"),
        ", ".join(part for part in (facts.strategy, ranks, facts.device) if part),
        facts.steps_phrase,
        phrase(facts.final_loss, "loss {:.4g}"),
        phrase(facts.eval_loss, "evaluation loss {:.4g}"),
        phrase(facts.tokens_per_s, "{count} tokens/s"),
        f"peak {format_bytes(facts.peak_bytes)} per rank" if facts.peak_bytes is not None else "",
    )


def _planned_strategy(folder: TrainingFolder) -> str | None:
    try:
        return Plan.from_tables(folder.plan).strategy_name if folder.plan else None
    except InputError:  # a plan of another version
        return None


def _num_ranks(folder: TrainingFolder) -> int | None:
    recorded = count(table(folder.ledger, "run").get("num_ranks"))
    if recorded is not None or not folder.plan:
        return recorded
    return math.prod(count(table(folder.plan, "mesh").get(axis, 1)) or 1 for axis in axes.MESH_ORDER)


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in map(number, values) if value]
    return statistics.median(known) if known else None
