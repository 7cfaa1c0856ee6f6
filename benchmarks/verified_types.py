"""`weft verify` of tiny models, many model types in one start of the ranks: the runs, the ranks' part, rows of results.

It runs nothing by itself: `expert_families.py` and `context_families.py` say which types and plans are verified.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_families as tiny
from type_groups import keep_findings, run_groups
from verify_ranks import joined, session_of

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.resolve import resolve

Facts = dict[str, Any]
STEPS, TYPES_A_GROUP = 4, 8
SOME_STAGES = ("training against the reference", "prediction")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The run and the plan to verify, or the sentence that refuses them before ranks start."""

    run: Facts = field(default_factory=dict)
    plan: Facts = field(default_factory=dict)
    refused: str = ""


def case_of(run: Facts, plan: Facts, *, num_ranks: int) -> Case:
    try:
        resolved = resolve(plan, RunSpec.from_tables(run), on_gpu=False, num_ranks=num_ranks)
    except WeftError as error:
        return Case(refused=str(error))
    return Case(run=run, plan=resolved.model_dump(mode="json", exclude_none=True))


def run_tables(model_type: str, config: Facts, corpus: Path, **data: Any) -> Facts:
    return {
        "model": {"type": model_type, "config": config},
        "data": {"source": str(corpus), "tokenizer": "bytes", "sequence_length": 32, "eval_fraction": 0.2, **data},
        "train": {"steps": 20, "global_batch": 8, "learning_rate": 1e-3, "warmup_steps": 2, "seed": 1},
        "ledger": {"dry_run": False},  # it takes seconds of a run, and no check reads it
    }


def verified(cases: dict[str, Case], *, num_ranks: int, stages: tuple[str, ...]) -> Iterator[tuple[str, Facts]]:
    """The judgement of every case; refused ones first."""
    left = {}
    for name, case in cases.items():
        if case.refused:
            yield name, {"verdict": "refused", "why": case.refused}
        else:
            left[name] = case
    for name, found in run_groups(_verify, list(left), num_ranks, left, stages, size=TYPES_A_GROUP):
        yield name, _judged(found[0])


def _verify(
    rank: int, _world: int, names: list[str], cases: dict[str, Case], stages: tuple[str, ...], folder: str
) -> None:
    """Each case in turn, on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with joined(folder) as process:
        for name in names:
            began_s, case = time.perf_counter(), cases[name]
            try:
                session = session_of(case.run, process, f"{folder}/{name}.runs", steps=STEPS)
                verdict = session.verify(Plan.from_tables(case.plan), stages=stages).as_dict()
            except WeftError as error:  # on every rank alike, before anything trains
                verdict = {"refused": str(error)}
            keep_findings({**verdict, "seconds": time.perf_counter() - began_s}, folder, name, rank)


def _judged(verdict: Facts) -> Facts:
    if "failed" in verdict:
        return {"verdict": "WRONG", "why": tiny.last_line(verdict["failed"])}
    if "refused" in verdict:
        return {"verdict": "refused", "why": verdict["refused"]}
    checks = {check["name"]: check for check in verdict["checks"]}
    wrong = verdict["first_wrong"]
    return {
        "verdict": "right" if verdict["ok"] else "WRONG",
        "why": f"{wrong}: {checks[wrong]['detail']}" if wrong else "",
        "margin": max(check["margin"] or 0.0 for check in verdict["checks"]),
        "untrained": verdict["untrained_parameters"],
        "prediction": checks["prediction"]["detail"] if "prediction" in checks else "",
        "seconds": verdict["seconds"],
    }
