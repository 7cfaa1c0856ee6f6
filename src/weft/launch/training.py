"""`weft.train(run, plan, ...)`: the full job from Python, in this process, on ranks of this machine, or under torchrun.

Between the command line and `Engine`: run folder, report, schedule, checkpoints and resume are those of `weft train`;
model, objective, optimizer, data and callbacks may be the caller's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.config import read_toml
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec

if TYPE_CHECKING:  # torch
    from weft.train.job import Job
    from weft.train.parts import TrainParts


def train(
    run: RunSpec | None = None,
    plan: Plan | None = None,
    *,
    model: Callable[[], Any] | None = None,
    objective: Any = None,
    optimizer: Any = None,
    data: Sequence[Any] | None = None,
    callbacks: Sequence[Callable[[Any], Any]] = (),
    nproc: int | None = None,
    out: str | Path | None = None,
    resume: str | Path | bool = False,
    max_restarts: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train; return the run's ledger, with the run folder under "run_dir".

    `model`: a function without arguments that builds the module, on every rank. `objective`: an object with
    `weight(batch)` and `loss_sum(model, batch)`. `optimizer`: a name, an `OptimizerPolicy` or a function. `data`: rows
    with input_ids and labels. `callbacks`: called with every `StepRecord` on every rank; one that returns True ends the
    run with a checkpoint. `nproc`: ranks to start on this machine; None takes as many as the plan has. `resume`: a run
    folder, whose run is then the default. `options`: of `weft.train.job.Job.create`.
    """
    from weft.train.job import Job
    from weft.train.parts import TrainParts
    from weft.train.ranks.environment import given_ranks

    parts = TrainParts(model=model, objective=objective, optimizer=optimizer, data=data, callbacks=tuple(callbacks))
    tables = plan.model_dump(mode="json", exclude_none=True) if plan else {}
    if isinstance(resume, str | Path):
        out, resume = Path(resume), True
        run = run or RunSpec.from_file(out / "run.toml")
        tables = tables or (read_toml(out / "plan.toml") if nproc is None else {})
    num_ranks = options.pop("num_ranks", None) or nproc
    job = Job.create(
        run=run or RunSpec.default(),
        plan_tables=tables,
        num_ranks=num_ranks,
        out=out,
        resume=resume,
        has_own_model=model is not None,
        **options,
    )
    if given_ranks(os.environ) is None and (job.plan.num_ranks > 1 or max_restarts):
        from weft.train.folder.run_folder import RunFolder

        launch_job(job, parts, max_restarts=max_restarts)
        return {"run_dir": str(job.out), **RunFolder(job.out).read_ledger()}
    from weft.train.worker import run_job

    return {"run_dir": str(job.out), **run_job(job, parts=parts)}


def launch_job(job: Job, parts: TrainParts | None = None, *, max_restarts: int) -> None:
    """Start the ranks of a job on this machine, and wait for their end."""
    from weft.launch.local import launch
    from weft.train.job import imports_of

    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(job.to_json(), encoding="utf-8")
        if parts is not None and not parts.is_empty:
            parts.write(path.with_suffix(".parts"))
        launch(
            [sys.executable, "-m", "weft.train", str(path)],
            num_ranks=job.plan.num_ranks,
            scratch=Path(scratch),
            max_restarts=max_restarts,
            imports=imports_of(job.run),
            memory_copies=max_restarts > 0 and job.run.checkpoint.memory_every > 0,
        )
