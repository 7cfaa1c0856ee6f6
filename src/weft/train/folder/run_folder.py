"""The folder of a run: run.toml, plan.toml, metrics.jsonl, ledger.json, report.html, checkpoints/, tensorboard/, and
offload/ with the optimizer states of a plan that keeps them in files.

A mixture of experts also has experts.jsonl: the load of every expert, every `logging.every` steps. With
`samples.every` there is samples.jsonl: the texts that the model wrote.

Only rank 0 writes here, except for checkpoints and states.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from weft.core.disk import writing
from weft.core.errors import InputError, RunFolderError
from weft.core.json_files import read_json_table
from weft.core.plan import Plan
from weft.core.records import ExpertLoads, StepRecord, TextSample
from weft.core.run_spec import RunSpec
from weft.core.state_folder import StateFolder
from weft.train.folder.metrics_file import MetricsFile

LOGS_NAME = "logs"  # what ranks on several hosts print


class RunFolder:
    """Paths and writers of one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl", StepRecord.from_dict)
        self.experts = MetricsFile(path / "experts.jsonl", ExpertLoads.from_dict)
        self.samples = MetricsFile(path / "samples.jsonl", TextSample.from_dict)
        self.ledger_path = path / "ledger.json"
        self.checkpoints_path = path / "checkpoints"
        self.tensorboard_path = path / "tensorboard"
        self.reference_path = path / "reference.safetensors"  # log-probabilities of the initial weights, for pairs
        self.sample_path = path / "sample.txt"  # one row of the data, with the tokens that count
        self.model_path = path / "model"  # the Hugging Face config, for export

    def states(self, *, after_step: int | None = None) -> StateFolder:
        """Optimizer states in files; `after_step` as in StateFolder."""
        own = f"{self.path.name}-{zlib.crc32(str(self.path.absolute()).encode()):08x}"
        return StateFolder(path=self.path / "offload", run=own, after_step=after_step)

    def has_committed_states(self) -> bool:
        """Whether files of optimizer states have a commit record, by name only."""
        try:
            named = Plan.from_file(self.path / "plan.toml").offload.folder
        except (InputError, OSError):
            return False
        states = self.states()
        folder = Path(named) / states.run if named else states.path
        return any(folder.glob("rank-*.json"))

    def create(self, run: RunSpec, plan: Plan) -> None:
        """Create the folder and write the two resolved documents."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "plan.toml", plan.to_toml())
            write_whole(self.path / "run.toml", run.to_toml())
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} cannot be written: {error}", hint="choose another --out"
            ) from None

    def read_run(self) -> RunSpec:
        return RunSpec.from_file(self.path / "run.toml")

    def write_ledger(self, ledger: dict[str, Any]) -> None:
        write_json(self.ledger_path, ledger)

    def read_ledger(self) -> dict[str, Any]:
        return read_json(self.ledger_path)


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write atomically: a concurrent reader finds the old file or the new one."""
    write_whole(path, json.dumps(fields, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    with writing(path):
        draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The table of a JSON file; empty if there is no file."""
    return read_json_table(path, hint="the file is damaged: remove it") if path.exists() else {}


def require_run(path: Path) -> None:
    """Require both documents, since any folder may contain a user's own run.toml."""
    for name in ("run.toml", "plan.toml"):
        if not (path / name).is_file():
            raise RunFolderError(
                f"{path} is not a run folder: it has no {name}", hint="give a folder written by `weft train`"
            )
