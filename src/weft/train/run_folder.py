"""The folder of a run: run.toml, plan.toml, metrics.jsonl, ledger.json, report.html, checkpoints/, tensorboard/.

Only rank 0 writes here, checkpoints excepted. A line of metrics.jsonl is final once written; a resume drops the lines
of steps that will be run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.core.errors import RunFolderError
from weft.core.plan import Plan
from weft.core.records import StepRecord
from weft.core.run_spec import RunSpec


class RunFolder:
    """Paths and writers of one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.ledger_path = path / "ledger.json"
        self.checkpoints_path = path / "checkpoints"
        self.tensorboard_path = path / "tensorboard"
        self.model_path = path / "model"  # the Hugging Face config, for export

    def create(self, run: RunSpec, plan: Plan) -> None:
        """Make the folder and write the two resolved documents."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "run.toml").write_text(run.to_toml(), encoding="utf-8")
            (self.path / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} cannot be written: {error}", hint="choose another --out"
            ) from None

    def drop_metrics_after(self, step: int) -> list[StepRecord]:
        """Keep the lines up to `step`; a line cut short by a crash is dropped too."""
        kept = [record for record in self.read_metrics() if record.step <= step]
        text = "".join(json.dumps(record.as_dict()) + "\n" for record in kept)
        draft = self.metrics_path.with_suffix(".tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.metrics_path)
        return kept

    def append_metrics(self, record: StepRecord) -> None:
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_dict()) + "\n")

    def read_metrics(self) -> list[StepRecord]:
        if not self.metrics_path.exists():
            return []
        records = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(StepRecord.from_dict(json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                continue
        return records

    def write_ledger(self, ledger: dict[str, Any]) -> None:
        draft = self.ledger_path.with_suffix(".tmp")
        draft.write_text(json.dumps(ledger, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.ledger_path)

    def read_ledger(self) -> dict[str, Any]:
        return json.loads(self.ledger_path.read_text(encoding="utf-8")) if self.ledger_path.exists() else {}


def require_free(path: Path) -> None:
    """A new run never writes over an old one."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunFolderError(f"{path} is there already", hint=f"choose another --out, or go on with --resume {path}")


def require_run(path: Path) -> None:
    """Both documents, since a user's own run.toml may lie in any folder."""
    for name in ("run.toml", "plan.toml"):
        if not (path / name).is_file():
            raise RunFolderError(
                f"{path} is not a run folder: it has no {name}", hint="give the folder a `weft train` wrote"
            )
