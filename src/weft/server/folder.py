"""The folder of a run on parameter servers: run.toml, metrics.jsonl, ledger.json, server.json, servers/, tensorboard/.

Only the driver writes here, the servers' own folders and the log files of children excepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.core.errors import RunFolderError
from weft.core.server_spec import ServerRun
from weft.server.step_record import ServerStepRecord


class ServerFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_path = path / "run.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.tensorboard_path = path / "tensorboard"
        self.logs_path = path / "logs"
        self.servers_path = path / "servers"
        self._tensorboard: Any = None

    def create(self, run: ServerRun) -> None:
        try:
            self.logs_path.mkdir(parents=True, exist_ok=True)
            self.run_path.write_text(run.to_toml(), encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} cannot be written: {error}", hint="choose another --out"
            ) from None

    def require_run(self) -> None:
        """There is a run here to go on with."""
        for path in (self.run_path, self.servers_path):
            if not path.exists():
                raise RunFolderError(
                    f"{self.path} is not the folder of a run on servers: it has no {path.name}",
                    hint="give the folder that a run wrote",
                )

    def drop_metrics_after(self, step: int) -> list[ServerStepRecord]:
        """Keep the lines up to `step`; a line cut short by a crash goes too."""
        kept = [record for record in self.read_metrics() if record.step <= step]
        draft = self.metrics_path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(record.as_dict()) + "\n" for record in kept), encoding="utf-8")
        draft.replace(self.metrics_path)
        return kept

    def read_metrics(self) -> list[ServerStepRecord]:
        if not self.metrics_path.exists():
            return []
        records = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(ServerStepRecord.from_dict(json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                continue
        return records

    def append_metrics(self, record: ServerStepRecord, *, tensorboard: bool) -> None:
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_dict()) + "\n")
        if tensorboard:
            self._write_tensorboard(record)

    def write_json(self, name: str, fields: dict[str, Any]) -> None:
        draft = self.path / f"{name}.tmp"
        draft.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path / name)

    def read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_tensorboard(self, record: ServerStepRecord) -> None:
        if self._tensorboard is None:  # after the first step: importing TensorBoard takes a second
            from torch.utils.tensorboard import SummaryWriter

            purge = record.step if record.step > 1 else None
            self._tensorboard = SummaryWriter(str(self.tensorboard_path), purge_step=purge)
        for tag, value in _scalars(record).items():
            self._tensorboard.add_scalar(tag, value, record.step)


def _scalars(record: ServerStepRecord) -> dict[str, float]:
    values = {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/staleness": record.staleness_mean,
        "speed/samples_per_s": record.samples_per_s,
        "speed/step_s": record.step_s,
        "speed/wait_s": record.wait_s,
        "evaluation/loss": record.eval_loss,
        "evaluation/auc": record.auc,
    }
    return {tag: value for tag, value in values.items() if value is not None}
