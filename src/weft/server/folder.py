"""The folder of a run on parameter servers: run.toml, metrics.jsonl, ledger.json, server.json, servers/, tensorboard/.

Only the driver writes here, the servers' own folders and the log files of children excepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core.errors import RunFolderError
from weft.core.server_spec import ServerRun
from weft.server.step_record import ServerStepRecord
from weft.train.metrics_file import MetricsFile
from weft.train.run_folder import read_json, write_json
from weft.train.tensorboard import TensorBoard


class ServerFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_path = path / "run.toml"
        self.metrics = MetricsFile(path / "metrics.jsonl", ServerStepRecord.from_dict)
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
        """There is a run here to go on with."""
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

    def write_json(self, name: str, fields: dict[str, Any]) -> None:
        write_json(self.path / name, fields)

    def read_json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

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
