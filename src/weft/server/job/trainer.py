"""`Trainer`: any nn.Module with `ShardedEmbedding`s, trained on parameter servers from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core.server_spec import ServerRun
from weft.server.job.driver import run_job
from weft.server.model.task import Build


class Trainer:
    """Trains a model of your own.

        def build(run):                       # called in the driver and in every worker
            return MyModel()                  # nn.Module: (keys [n, fields], numeric [n, counts]) -> logits [n],
                                              # on the run's click data; or a `Task`: your own data and loss

        ledger = Trainer(build, run=ServerRun(server=ServerSpec(launcher="in_process"))).fit("runs/mine")
        ledger = Trainer("my_package.model:build", run=ServerRun()).fit("runs/mine")      # processes, Ray

    Only the launcher "in_process" takes a function; other processes need its name, "module:function".
    `fit` trains and returns the ledger; `fit(out, resume=True)` continues from the servers of that folder.
    """

    def __init__(self, build: Build | str | None = None, *, run: ServerRun | None = None, quiet: bool = False) -> None:
        self.run = run or ServerRun()
        self._build: Build | None = None
        self._quiet = quiet
        if isinstance(build, str):
            self.run = self.run.model_copy(update={"model": self.run.model.model_copy(update={"factory": build})})
        else:
            self._build = build

    def fit(self, out: str | Path, *, resume: bool = False, address: str | None = None) -> dict[str, Any]:
        """Train into the run folder `out`. `address`: of a Ray cluster."""
        return run_job(self.run, Path(out), resume=resume, address=address, build=self._build, quiet=self._quiet)
