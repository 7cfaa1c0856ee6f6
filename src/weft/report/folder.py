"""Reads a run folder as it was left: whole, cut short, or resumed. It judges nothing and draws nothing.

What cannot be read becomes a remark, never a stack trace: a report is most needed for the run that went wrong.
The one order that matters: metrics.jsonl is append-only, so a step number that does not grow means a resume, and the
lines from that step on belong to the abandoned attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from weft.core.errors import RunFolderError
from weft.core.json_files import parse_json, parse_toml
from weft.core.records import StepRecord
from weft.report.changes import RunChange, read_changes
from weft.report.series import Numbered

METRICS, LEDGER, RUN, PLAN = "metrics.jsonl", "ledger.json", "run.toml", "plan.toml"
PIPELINE = "pipeline.json"  # of runs with a pipeline only
SERVER = "server.json"  # of runs on parameter servers only
MAX_NUMBER = 1e200
MAX_STEP = 2**53  # beyond it a number of a page is no longer exact

Step = TypeVar("Step", bound=Numbered)


@dataclass(frozen=True, kw_only=True)
class Metrics(Generic[Step]):
    """The steps of the run as it counts, and what happened to the lines that do not."""

    steps: tuple[Step, ...] = ()
    resumed_after: tuple[int, ...] = ()  # the last step kept before each rewind
    num_repeated: int = 0
    num_unreadable: int = 0


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Everything the page needs. Tables are empty and texts None where a file is missing; `remarks` says so."""

    path: Path
    metrics: Metrics[StepRecord]
    ledger: dict[str, Any]
    run: dict[str, Any]
    plan: dict[str, Any]
    run_text: str | None
    plan_text: str | None
    remarks: tuple[str, ...]
    pipeline: dict[str, Any] = field(default_factory=dict)
    changes: tuple[RunChange, ...] = ()


def read_folder(run_dir: Path) -> RunFolder:
    """The run folder at `run_dir`; RunFolderError where there is no run to draw."""
    require_run(run_dir)
    remarks: list[str] = []
    run_text, run = read_document(run_dir / RUN, remarks)
    plan_text, plan = read_document(run_dir / PLAN, remarks)
    metrics = read_metrics(run_dir / METRICS, remarks, parse=_parse_step)
    ledger = _read_ledger(run_dir / LEDGER, remarks)
    pipeline = _read_pipeline(run_dir / PIPELINE, remarks)
    changes = read_changes(run_dir, remarks)
    remarks += [f"Changed after step {change.step:,}: {'; '.join(change.lines)}." for change in changes]
    return RunFolder(
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
    )


def is_server_run(run_dir: Path) -> bool:
    """Told by the [server] table of run.toml; where that cannot be read, by the other files."""
    unsaid: list[str] = []  # whoever reads the folder remarks on it
    _, run = read_document(run_dir / RUN, unsaid)
    if run:
        return isinstance(run.get("server"), dict)
    return (run_dir / SERVER).is_file() or read_json(run_dir / LEDGER, unsaid).get("kind") == "server"


def table(tables: Any, *keys: str) -> dict[str, Any]:
    """The table found by walking `keys`, or an empty one: a ledger of a stopped run may lack any part."""
    for key in keys:
        tables = tables.get(key) if isinstance(tables, dict) else None
    return tables if isinstance(tables, dict) else {}


def rows(tables: Any, key: str) -> list[dict[str, Any]]:
    """The list of tables under `key`; whatever else stands there is left out."""
    value = table(tables).get(key)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, or None; so is one whose sums would not be finite, since JSON has no infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < MAX_NUMBER else None  # false for NaN too


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


def read_document(path: Path, remarks: list[str]) -> tuple[str | None, dict[str, Any]]:
    text = _read_text(path, remarks)
    try:
        return text, parse_toml(text or "")
    except ValueError as error:
        remarks.append(f"{path.name} is not TOML: {error}.")
        return text, {}


def _read_ledger(path: Path, remarks: list[str]) -> dict[str, Any]:
    if not path.exists():
        remarks.append(f"{path.name} is missing.")
        remarks.append(
            "Without the ledger there is nothing to say about memory terms, time terms, dtypes and coverage."
        )
        return {}
    return read_json(path, remarks)


def _read_pipeline(path: Path, remarks: list[str]) -> dict[str, Any]:
    """Of a run with a pipeline; any other has no such file, and nothing to say about it."""
    return read_json(path, remarks) if path.exists() else {}


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


def _replay(text: str, parse: Callable[[str], Step | None]) -> Metrics[Step]:
    kept: list[Step] = []
    resumed_after: list[int] = []
    num_repeated = num_unreadable = 0
    for line in text.splitlines():
        if not line.strip():
            continue
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
    """A line as a record; a quantity that is missing or no number is NaN: a gap in the curve, not a false zero."""
    fields = step_fields(line)
    if fields is None:
        return None
    defaults = {"loss": math.nan, "grad_norm": math.nan, "tokens": 0, "learning_rate": math.nan}
    given = {key: value for key, value in fields.items() if isinstance(value, int | float)}
    return StepRecord.from_dict({**defaults, **given})


def step_fields(line: str) -> dict[str, Any] | None:
    """What a line of metrics.jsonl holds; None where it is no step."""
    try:
        fields = table(parse_json(line))
    except ValueError:
        return None
    step = fields.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_STEP
    return fields if is_step else None
