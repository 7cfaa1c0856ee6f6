"""Reads the folder of a training or of a run on parameter servers as it was left: complete, cut short, or resumed.

A file that cannot be read becomes a remark, never a stack trace: a report is most needed for the run that went wrong.
The one order that matters: metrics.jsonl is append-only, so a step number that does not grow means a resume, and the
lines from that step on belong to the abandoned attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

from weft.core.errors import RunFolderError
from weft.core.json_files import parse_json, parse_toml
from weft.core.records import ExpertLoads, StepRecord
from weft.report.changes import ReportedChange, read_changes
from weft.report.fields import count, number, rows, table
from weft.report.series import Numbered

METRICS, LEDGER, RUN, PLAN = "metrics.jsonl", "ledger.json", "run.toml", "plan.toml"
PIPELINE = "pipeline.json"  # only of trainings with a pipeline
PROFILE, OPERATORS = "profile", "operators.json"  # the folder of weft profile, and its largest operators
SAMPLES = "samples.jsonl"  # only with samples.every
EXPERTS = "experts.jsonl"  # only of mixtures of experts
BAD_STEPS = "bad_steps.jsonl"  # only of runs with a loss that was not finite, or a spike
SERVER = "server.json"  # only of runs on parameter servers; written at every evaluation and snapshot

Step = TypeVar("Step", bound=Numbered)


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """A line of metrics.jsonl of a run on servers; a missing value is NaN: a gap in the curve, not a false zero."""

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
class Metrics(Generic[Step]):
    """The steps of the run without abandoned attempts, and counts of the lines that were left out."""

    steps: tuple[Step, ...] = ()
    resumed_after: tuple[int, ...] = ()  # the last step kept before each rewind
    num_repeated: int = 0
    num_unreadable: int = 0


@dataclass(frozen=True, kw_only=True)
class RunRecords(Generic[Step]):
    """The records of a run. Tables are empty and texts None where a file is missing; `remarks` lists those."""

    path: Path
    metrics: Metrics[Step]
    ledger: dict[str, Any]
    run: dict[str, Any]
    run_text: str | None
    remarks: tuple[str, ...]
    plan: dict[str, Any] = field(default_factory=dict)
    plan_text: str | None = None
    pipeline: dict[str, Any] = field(default_factory=dict)
    changes: tuple[ReportedChange, ...] = ()
    servers: dict[str, Any] = field(default_factory=dict)  # of server.json
    experts: tuple[ExpertLoads, ...] = ()  # of a mixture of experts
    bad_steps: tuple[dict[str, Any], ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    profile: dict[str, Any] = field(default_factory=dict)  # profile/operators.json
    profile_files: tuple[str, ...] = ()


TrainingFolder = RunRecords[StepRecord]
ServerFolder = RunRecords[ServerStep]


def read_folder(run_dir: Path) -> TrainingFolder:
    """The folder of a training; RunFolderError where there is no run to draw."""
    require_run(run_dir)
    remarks: list[str] = []
    run_text, run = _read_document(run_dir / RUN, remarks)
    plan_text, plan = _read_document(run_dir / PLAN, remarks)
    metrics = read_metrics(run_dir / METRICS, remarks, parse=_parse_step)
    ledger = read_json(run_dir / LEDGER, remarks)
    if not (run_dir / LEDGER).exists():
        remarks.append("Without the ledger there are no memory terms, time terms, dtypes and coverage.")
    pipeline = read_json(run_dir / PIPELINE, remarks) if (run_dir / PIPELINE).exists() else {}
    changes = read_changes(run_dir, remarks)
    remarks += [f"Changed after step {change.step:,}: {'; '.join(change.lines)}." for change in changes]
    return RunRecords(
        path=run_dir,
        metrics=metrics,
        ledger=ledger,
        run=run,
        plan=plan,
        run_text=run_text,
        plan_text=plan_text,
        remarks=tuple(remarks),
        pipeline=pipeline,
        changes=changes,
        experts=_read_experts(run_dir / EXPERTS),
        bad_steps=read_lines(run_dir / BAD_STEPS),
        samples=read_lines(run_dir / SAMPLES),
        profile=read_json(run_dir / PROFILE / OPERATORS, remarks) if (run_dir / PROFILE / OPERATORS).exists() else {},
        profile_files=tuple(sorted(f"{PROFILE}/{path.name}" for path in (run_dir / PROFILE).glob("*-rank*"))),
    )


def read_server_folder(run_dir: Path) -> ServerFolder:
    """The folder of a run on parameter servers; RunFolderError where there is no such run to draw."""
    require_run(run_dir)
    if not is_server_run(run_dir):
        raise RunFolderError(
            f"{run_dir} is not the folder of a run on parameter servers",
            hint="only runs on parameter servers can be drawn beside each other; leave --beside out",
        )
    remarks: list[str] = []
    run_text, run = _read_document(run_dir / RUN, remarks)
    metrics = read_metrics(run_dir / METRICS, remarks, parse=_parse_server_step)
    servers = read_json(run_dir / SERVER, remarks)
    ledger = read_json(run_dir / LEDGER, remarks)
    if not servers:
        remarks.append(f"Without {SERVER} there are no figures of servers, workers, staleness, keys and events.")
    if not ledger:
        remarks.append("Without the ledger the end of the run is not known.")
    return RunRecords(
        path=run_dir,
        metrics=replace(metrics, steps=_with_evaluations(metrics.steps, rows(servers, "evaluations"))),
        ledger=ledger,
        servers=servers,
        run=run,
        run_text=run_text,
        remarks=tuple(remarks),
    )


def is_server_run(run_dir: Path) -> bool:
    """Decided by the [server] table of run.toml; by the other files where run.toml cannot be read."""
    ignored: list[str] = []  # the reader of the folder collects the remarks
    _, run = _read_document(run_dir / RUN, ignored)
    if run:
        return isinstance(run.get("server"), dict)
    return (run_dir / SERVER).is_file() or read_json(run_dir / LEDGER, ignored).get("kind") == "server"


def train_seconds(steps: Sequence[ServerStep]) -> list[float] | None:
    """The training time at the end of each step; None where a step has no duration."""
    known = [number(step.step_s) for step in steps]
    lengths = [length for length in known if length is not None]
    return list(accumulate(lengths)) if len(lengths) == len(known) else None


def require_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise RunFolderError(f"there is no run folder {run_dir}", hint="give the folder that `weft train --out` wrote")
    if not (run_dir / METRICS).is_file() and not (run_dir / RUN).is_file():
        raise RunFolderError(
            f"{run_dir} is not a run folder: it has neither {METRICS} nor {RUN}",
            hint="give the folder that `weft train --out` wrote, not one above or inside it",
        )


def _read_text(path: Path, remarks: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        remarks.append(f"{path.name} is missing.")
    except OSError as error:
        remarks.append(f"{path.name} cannot be read: {error.strerror or error}.")
    return None


def _read_document(path: Path, remarks: list[str]) -> tuple[str | None, dict[str, Any]]:
    text = _read_text(path, remarks)
    try:
        return text, parse_toml(text or "")
    except ValueError as error:
        remarks.append(f"{path.name} is not TOML: {error}.")
        return text, {}


def read_json(path: Path, remarks: list[str]) -> dict[str, Any]:
    text = _read_text(path, remarks)
    try:
        return table(parse_json(text)) if text is not None else {}
    except ValueError as error:
        remarks.append(f"{path.name} is not JSON: {error}.")
        return {}


def read_metrics(path: Path, remarks: list[str], *, parse: Callable[[str], Step | None]) -> Metrics[Step]:
    text = _read_text(path, remarks)
    if text is None:
        return Metrics()
    metrics = _replay(text, parse)
    if not metrics.steps:
        remarks.append(f"{path.name} holds no step: the run ended before its first step was done.")
    elif metrics.steps[0].step > 1:
        remarks.append(f"{path.name} begins at step {metrics.steps[0].step:,}.")
    if metrics.num_unreadable:
        remarks.append(f"{metrics.num_unreadable} of the lines of {path.name} could not be read and were left out.")
    if metrics.num_repeated:
        remarks.append(f"{metrics.num_repeated} steps were run again after a resume; the later run of each is drawn.")
    return metrics


def _read_experts(path: Path) -> tuple[ExpertLoads, ...]:
    """Remarks on its steps would repeat those on metrics.jsonl."""
    return read_metrics(path, [], parse=_parse_experts).steps if path.exists() else ()


def read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines with a step of a file that may be missing, in their order."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(found for found in map(step_fields, lines) if found is not None)


def _parse_experts(line: str) -> ExpertLoads | None:
    """None for a line whose loads do not fit its layers."""
    given = step_fields(line)
    try:
        found = ExpertLoads.from_dict(given) if given is not None else None
        return found if found is not None and sum(map(len, found.by_layer().values())) == sum(found.experts) else None
    except (ValueError, TypeError, KeyError):
        return None


def _replay(text: str, parse: Callable[[str], Step | None]) -> Metrics[Step]:
    kept: list[Step] = []
    resumed_after: list[int] = []
    num_repeated = num_unreadable = 0
    for line in filter(str.strip, text.splitlines()):
        record = parse(line)
        if record is None:
            num_unreadable += 1
            continue
        if kept and record.step <= kept[-1].step:
            resumed_after.append(record.step - 1)
        while kept and kept[-1].step >= record.step:
            kept.pop()
            num_repeated += 1
        kept.append(record)
    return Metrics(
        steps=tuple(kept),
        resumed_after=tuple(resumed_after),
        num_repeated=num_repeated,
        num_unreadable=num_unreadable,
    )


def _parse_step(line: str) -> StepRecord | None:
    """A line as a record; a missing or malformed quantity is NaN: a gap in the curve, not a false zero."""
    given = step_fields(line)
    if given is None:
        return None
    defaults = {"loss": math.nan, "grad_norm": math.nan, "tokens": 0, "learning_rate": math.nan}
    numbers = {key: value for key, value in given.items() if isinstance(value, int | float)}
    sets = {name: table(found) for name, found in table(given.get("evaluations")).items()}
    known = {
        name: {"loss": number(one.get("loss")), "tokens": count(one.get("tokens")) or 0} for name, one in sets.items()
    }
    return StepRecord.from_dict({**defaults, **numbers, **({"evaluations": known} if known else {})})


def _parse_server_step(line: str) -> ServerStep | None:
    given = step_fields(line)
    if given is None:
        return None
    known = {field.name: number(given.get(field.name)) for field in fields(ServerStep) if field.name != "step"}
    return ServerStep(step=given["step"], **{key: value for key, value in known.items() if value is not None})


def step_fields(line: str) -> dict[str, Any] | None:
    """The fields of a line of metrics.jsonl; None where it is not a step."""
    try:
        found = table(parse_json(line))
    except ValueError:
        return None
    return None if count(found.get("step")) is None else found


def _with_evaluations(steps: Sequence[ServerStep], evaluations: Sequence[dict[str, Any]]) -> tuple[ServerStep, ...]:
    """A resumed run may evaluate at a step that metrics.jsonl has already: then only server.json has the figures."""
    by_step = {evaluation.get("step"): evaluation for evaluation in evaluations if number(evaluation.get("step"))}
    return tuple(_with_evaluation(step, by_step[step.step]) if step.step in by_step else step for step in steps)


def _with_evaluation(step: ServerStep, evaluation: dict[str, Any]) -> ServerStep:
    loss, auc = number(evaluation.get("loss")), number(evaluation.get("auc"))
    return replace(
        step,
        eval_loss=loss if math.isnan(step.eval_loss) and loss is not None else step.eval_loss,
        auc=auc if math.isnan(step.auc) and auc is not None else step.auc,
    )
