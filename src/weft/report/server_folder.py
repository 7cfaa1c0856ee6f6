"""Reads the folder of a run on parameter servers as it was left: run.toml, metrics.jsonl, server.json, ledger.json.

It judges nothing and draws nothing. What cannot be read becomes a remark. server.json is written at every evaluation
and snapshot, so a run that was cut short has one too, somewhat older than its last step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from weft.core.errors import RunFolderError
from weft.report.folder import (
    LEDGER,
    METRICS,
    RUN,
    SERVER,
    Metrics,
    is_server_run,
    number,
    read_document,
    read_json,
    read_metrics,
    require_run,
    rows,
    step_fields,
)


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """A line of metrics.jsonl; what is missing or no number is NaN: a gap in the curve, not a false zero."""

    step: int  # 1 for the first
    loss: float = math.nan  # mean over the step's samples
    samples: float = math.nan
    step_s: float = math.nan
    samples_per_s: float = math.nan
    staleness_mean: float = math.nan  # units
    wait_s: float = math.nan  # mean over the units
    eval_loss: float = math.nan
    auc: float = math.nan


@dataclass(frozen=True, kw_only=True)
class ServerRunFolder:
    """Everything the page needs. Tables are empty and texts None where a file is missing; `remarks` says so."""

    path: Path
    metrics: Metrics[ServerStep]
    ledger: dict[str, Any]
    figures: dict[str, Any]  # of server.json
    run: dict[str, Any]
    run_text: str | None
    remarks: tuple[str, ...]


def read_server_folder(run_dir: Path) -> ServerRunFolder:
    """The run folder at `run_dir`; RunFolderError where there is no run on parameter servers to draw."""
    require_run(run_dir)
    if not is_server_run(run_dir):
        raise RunFolderError(
            f"{run_dir} is not the folder of a run on parameter servers",
            hint="only runs on parameter servers can be drawn beside each other; leave --beside out",
        )
    remarks: list[str] = []
    run_text, run = read_document(run_dir / RUN, remarks)
    metrics = read_metrics(run_dir / METRICS, remarks, parse=_parse_step)
    figures = read_json(run_dir / SERVER, remarks)
    ledger = read_json(run_dir / LEDGER, remarks)
    if not figures:
        remarks.append(f"Without {SERVER} there is nothing to say about servers, workers, staleness, keys and events.")
    if not ledger:
        remarks.append("Without the ledger it is not known how the run ended.")
    return ServerRunFolder(
        path=run_dir,
        metrics=replace(metrics, steps=_with_evaluations(metrics.steps, rows(figures, "evaluations"))),
        ledger=ledger,
        figures=figures,
        run=run,
        run_text=run_text,
        remarks=tuple(remarks),
    )


def train_seconds(steps: Sequence[ServerStep]) -> list[float] | None:
    """The time of training at the end of each step; None where a step does not say how long it took."""
    known = [number(step.step_s) for step in steps]
    lengths = [length for length in known if length is not None]
    return list(accumulate(lengths)) if len(lengths) == len(known) else None


def staleness_counts(figures: dict[str, Any]) -> dict[int, float]:
    """Pushes by staleness in units, ascending."""
    found = figures.get("staleness")
    pairs = found.items() if isinstance(found, dict) else ()
    counts = {int(tau): number(count) or 0.0 for tau, count in pairs if tau.isdecimal() and len(tau) < 12}
    return {tau: counts[tau] for tau in sorted(counts) if counts[tau] > 0}


def _parse_step(line: str) -> ServerStep | None:
    given = step_fields(line)
    if given is None:
        return None
    known = {field.name: number(given.get(field.name)) for field in fields(ServerStep) if field.name != "step"}
    return ServerStep(step=given["step"], **{key: value for key, value in known.items() if value is not None})


def _with_evaluations(steps: Sequence[ServerStep], evaluations: Sequence[dict[str, Any]]) -> tuple[ServerStep, ...]:
    """A resumed run may evaluate at a step whose line is already written: then only server.json has the figures."""
    told = {evaluation.get("step"): evaluation for evaluation in evaluations if number(evaluation.get("step"))}
    return tuple(_with_evaluation(step, told[step.step]) if step.step in told else step for step in steps)


def _with_evaluation(step: ServerStep, evaluation: dict[str, Any]) -> ServerStep:
    loss, auc = number(evaluation.get("loss")), number(evaluation.get("auc"))
    return replace(
        step,
        eval_loss=loss if math.isnan(step.eval_loss) and loss is not None else step.eval_loss,
        auc=auc if math.isnan(step.auc) and auc is not None else step.auc,
    )
