"""Files of a run on parameter servers: run.toml, metrics.jsonl, ledger.json, server.json; and its progress lines.

Only the driver writes here, except for the folders of the servers and the log files of child processes.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core.errors import RunFolderError
from weft.core.records import parse_record, record_fields
from weft.core.server_spec import ServerRun
from weft.core.units import format_bytes, format_count, format_seconds
from weft.server.units import UnitReport
from weft.train.folder.metrics_file import MetricsFile
from weft.train.loggers.step_progress import StepProgress
from weft.train.loggers.tensorboard import TensorBoard


@dataclass(frozen=True, kw_only=True)
class ServerStepRecord:
    step: int  # 1 for the first
    loss: float  # mean over the samples of the step, each from the forward of its worker
    samples: int
    step_s: float  # since the end of the last step
    samples_per_s: float
    learning_rate: float  # of the embedding rows
    staleness_mean: float  # units that servers applied between a pull and its push
    wait_s: float  # mean over the units: for work, rows and acknowledgements
    eval_loss: float | None = None
    auc: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return record_fields(self)

    @staticmethod
    def from_dict(given: dict[str, Any]) -> ServerStepRecord:
        return parse_record(ServerStepRecord, given, numbers=("loss",))


class StepCollector:
    """Collects reports of units; returns the records of complete steps, in order."""

    def __init__(self, *, shares: int, first_unit: int, learning_rate: float, now: float) -> None:
        self._shares, self._learning_rate = shares, learning_rate
        self._step = first_unit // shares  # the next to be written, from 0
        self._units: dict[int, list[UnitReport]] = {}
        self._has_begun = False
        self._since = now

    def start_time(self, began: float | None) -> None:
        """Training begins with the first unit, not with the processes."""
        if began is not None and not self._has_begun:
            self._has_begun, self._since = True, began

    def add(self, report: UnitReport) -> None:
        self._units.setdefault(report.unit // self._shares, []).append(report)

    def skip_time(self, now: float) -> None:
        """The time until now is not training time."""
        self._since = now

    def complete(self, *, done: int, now: float) -> list[ServerStepRecord]:
        """Records of the steps below the watermark `done`."""
        steps = range(self._step, done // self._shares)
        step_s = max(1e-9, (now - self._since) / max(1, len(steps)))
        records = [self._record(step, step_s) for step in steps]
        if records:
            self._step, self._since = steps.stop, now
        return records

    def _record(self, step: int, step_s: float) -> ServerStepRecord:
        units = self._units.pop(step, [])
        weight = sum(unit.weight for unit in units)
        staleness = [tau for unit in units for tau in unit.staleness]
        return ServerStepRecord(
            step=step + 1,
            loss=sum(unit.loss_sum for unit in units) / weight if weight else math.nan,
            samples=int(weight),
            step_s=step_s,
            samples_per_s=weight / step_s,
            learning_rate=self._learning_rate,
            staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
            wait_s=sum(unit.wait_s for unit in units) / max(1, len(units)),
        )


class ServerFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_path = path / "run.toml"
        self.metrics = MetricsFile(path / "metrics.jsonl", ServerStepRecord.from_dict)
        self.ledger_path = path / "ledger.json"
        self.figures_path = path / "server.json"
        self.logs_path = path / "logs"
        self.servers_path = path / "servers"
        self._tensorboard = TensorBoard(path / "tensorboard")

    def create(self, run: ServerRun) -> None:
        try:
            self.logs_path.mkdir(parents=True, exist_ok=True)
            self.run_path.write_text(run.to_toml(), encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} cannot be written: {error}", hint="choose another --out"
            ) from None

    def require_run(self) -> None:
        """Raises if the folder has no run to resume."""
        for path in (self.run_path, self.servers_path):
            if not path.exists():
                raise RunFolderError(
                    f"{self.path} is not the folder of a run on servers: it has no {path.name}",
                    hint="give the folder that a run wrote",
                )

    def append_metrics(self, record: ServerStepRecord, *, tensorboard: bool) -> None:
        self.metrics.append(record)
        if tensorboard:
            self._tensorboard.write(record.step, _scalars(record))

    def close(self) -> None:
        self._tensorboard.close()


def _scalars(record: ServerStepRecord) -> dict[str, float | None]:
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/staleness": record.staleness_mean,
        "speed/samples_per_s": record.samples_per_s,
        "speed/step_s": record.step_s,
        "speed/wait_s": record.wait_s,
        "evaluation/loss": record.eval_loss,
        "evaluation/auc": record.auc,
    }


def ledger_of(
    run: ServerRun,
    records: Sequence[ServerStepRecord],
    figures: dict[str, Any],
    *,
    status: str,
    times: dict[str, float],
    folder: Path,
) -> dict[str, Any]:
    last = figures["evaluations"][-1] if figures["evaluations"] else {}
    samples_per_s = sum(record.samples_per_s * record.step_s for record in records)
    seconds = sum(record.step_s for record in records)
    return {
        "kind": "server",
        "run_dir": str(folder),
        "run": {
            "status": status,
            "steps": records[-1].step if records else 0,
            "first_loss": records[0].loss if records else None,
            "final_loss": records[-1].loss if records else None,
            "eval_loss": last.get("loss"),
            "auc": last.get("auc"),
            "samples_per_s": samples_per_s / seconds if seconds else 0.0,
            **times,
            "mode": run.server.mode,
            "servers": run.server.servers,
            "workers": run.server.workers,
            "launcher": run.server.launcher,
        },
        "rows": sum(server["rows"] for server in figures["servers"]),
        "bytes": sum(server["bytes"] for server in figures["servers"]),
        "restarts": sum(event["event"] in ("worker lost", "server lost") for event in figures["events"]),
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "weft": __version__,
            **{name: version(name) for name in ("torch", "numpy", "numba")},
        },
    }


def server_row(stats: dict[str, Any]) -> dict[str, Any]:
    """The counters of a server, with its rates since its start."""
    up_s = max(1e-9, float(stats.get("up_s", 0.0)))
    tables = stats.get("tables", [])
    return {
        **stats,
        "rows": sum(table["rows"] for table in tables),
        "bytes": sum(table["bytes"] for table in tables),
        "pulled_rows_per_s": stats.get("pulled_rows", 0) / up_s,
        "pushed_rows_per_s": stats.get("pushed_rows", 0) / up_s,
        "load": stats.get("busy_s", 0.0) / up_s,
    }


def merged(histograms: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(tau): count for tau, count in histogram.items()})
    return {str(tau): total[tau] for tau in sorted(total)}


class ServerDisplay(StepProgress):
    def step(self, record: ServerStepRecord) -> None:
        stale = f"  staleness {record.staleness_mean:.1f}" if record.staleness_mean else ""
        figures = f"loss {record.loss:.4f}  {format_count(record.samples_per_s)} samples/s{stale}"
        self.advance(record.step, figures, step_s=record.step_s)

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        found = "  ".join(f"{name} {figures[name]:.4f}" for name in ("auc", "loss") if name in figures)
        if found:
            self.line(f"step {step}: held-out {found}")

    def summary(self, ledger: dict[str, Any]) -> None:
        run = ledger["run"]
        loss = (
            f"loss {run['first_loss']:.3f} -> {run['final_loss']:.3f}" if run["final_loss"] is not None else "no step"
        )
        held = f", held-out auc {run['auc']:.4f}" if run["auc"] is not None else ""
        self.line(
            f"{run['status']} at step {run['steps']}: {loss}{held}; {format_count(run['samples_per_s'])} samples/s,"
            f" {format_count(ledger['rows'])} rows in {format_bytes(ledger['bytes'])},"
            f" {format_seconds(run['elapsed_s'])}"
        )
