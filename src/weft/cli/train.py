"""`weft train`: resolve, then train in this process, in ranks that it starts, or as a rank of torchrun or Slurm."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import DeviceChoice, NumRanks, RunFile, Settings

if TYPE_CHECKING:  # imported inside the verb, to keep `weft --help` fast
    from weft.train.folder.lock import FolderLock
    from weft.train.job import Job


def train(
    run: RunFile = None,
    plan: Annotated[Path | None, typer.Option(help="plan.toml: the layout of the model.")] = None,
    nproc: NumRanks = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The new run folder; default runs/<model>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="The run folder to resume, on this or another layout.")] = None,
    continues: Annotated[
        bool,
        typer.Option("--continue", help="Continue the run in --out if there is one, else start it: for queued jobs."),
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts from the last checkpoint after a failure.")] = 0,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where to train; auto takes the GPUs when there are any.")
    ] = DeviceChoice.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's ledger as JSON on stdout.")] = False,
) -> None:
    """Train a model. Without arguments: a small Llama on Python's own source, on this machine."""
    from weft.cli.early_checks import require_inputs
    from weft.cli.resolve import plan_tables, require_known_sections, resolve_run
    from weft.train.folder.run_folder import RunFolder
    from weft.train.folder.state import is_finished, look_at
    from weft.train.job import Job, default_folder
    from weft.train.ranks.environment import given_ranks

    _require_one_start(resume, out, continues=continues)
    given = settings or []
    require_known_sections(given)
    outside = given_ranks(os.environ)
    wanted = outside if outside is not None else nproc
    if resume is not None:
        job = _resumed_job(resume, run, out, plan, given, wanted, device)
    else:
        spec, tables = resolve_run(run, given), plan_tables(plan, given)
        folder = out or default_folder(spec)
        if continues and is_finished(folder, steps=spec.train.steps):
            ledger = RunFolder(folder).read_ledger()
            ended = ledger["run"].get("ended")
            _print_note(
                f"the run in {folder} has " + (f"ended: {ended}" if ended else f"finished all {spec.train.steps} steps")
            )
            if as_json:
                print(json.dumps({"run_dir": str(folder.absolute()), **ledger}))
            return
        if outside is None and not (continues and look_at(folder).has_begun):
            look_at(folder).require_startable()
        require_inputs(spec)
        job = Job.create(
            run=spec,
            plan_tables=tables,
            num_ranks=wanted,
            out=folder,
            continues=continues,
            device=device.value,
            source=str(plan or "the plan"),
        )
    run_locked(job, max_restarts=max_restarts)
    if as_json and is_main_rank():
        print(json.dumps({"run_dir": str(job.out), **RunFolder(job.out).read_ledger()}))


def run_locked(job: Job, *, max_restarts: int = 0) -> None:
    """Train under the folder's lock: in this process, in ranks that it starts, or as one rank of given ones."""
    from weft.train.folder.lock import FolderLock
    from weft.train.ranks.environment import given_ranks

    is_one_of_many = given_ranks(os.environ) is not None
    run_training = _run_beside_dry_run if is_main_rank() and job.run.ledger.dry_run else _run
    with FolderLock(job.out) as lock:
        if not is_one_of_many:  # under torchrun rank 0 takes it after all ranks have joined: all fail with one message
            _print_note(lock.acquire())
            job = dataclasses.replace(job, is_locked=True)
        run_training(job, lock, is_one_of_many=is_one_of_many, max_restarts=max_restarts)


def is_main_rank() -> bool:
    """Whether this process is not another rank of a launcher than its first."""
    from weft.train.ranks.environment import given_ranks

    return given_ranks(os.environ) is None or int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def _require_one_start(resume: Path | None, out: Path | None, *, continues: bool) -> None:
    from weft.core.errors import BadValueError

    if continues and (resume is not None or out is None):
        raise BadValueError(
            "--continue needs --out, and no --resume", hint="--out names the folder of the run: the same at each start"
        )


def _resumed_job(
    folder: Path,
    run: Path | None,
    out: Path | None,
    plan: Path | None,
    settings: list[str],
    num_ranks: int | None,
    device: DeviceChoice,
) -> Job:
    from weft.cli.early_checks import require_inputs
    from weft.cli.resolve import resolve_resumed
    from weft.core.errors import BadValueError
    from weft.train.folder.changes import keys_of
    from weft.train.folder.state import look_at
    from weft.train.job import Job

    if run is not None or out is not None:
        raise BadValueError(
            "--resume takes no run.toml and no --out: it continues its own folder", hint="change values with --set"
        )
    look_at(folder).require_resumable()
    spec, tables = resolve_resumed(folder, plan, settings, num_ranks=num_ranks)
    require_inputs(spec)
    return Job.create(
        run=spec,
        plan_tables=tables,
        num_ranks=num_ranks,
        out=folder,
        resume=True,
        device=device.value,
        may_change=keys_of(settings),
        source=str(plan or "the plan"),
    )


def _run(job: Job, lock: FolderLock, *, is_one_of_many: bool, max_restarts: int) -> None:
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    if is_one_of_many:
        from weft.train.ranks.process import report_failures
        from weft.train.worker import run_job

        with report_failures(), lock.released_by_failure():
            run_job(job, lock=lock)
    elif job.plan.num_ranks == 1 and max_restarts == 0:
        from weft.train.worker import run_job

        run_job(job, lock=lock)
    else:
        from weft.launch.training import launch_job

        launch_job(job, max_restarts=max_restarts)


def _run_beside_dry_run(job: Job, lock: FolderLock, *, is_one_of_many: bool, max_restarts: int) -> None:
    """As `_run`, with a dry run of rank 0's step at the same time; its figures go into the run's ledger."""
    from weft.cli.dryrun.beside import DryRunBeside
    from weft.train.folder.run_folder import RunFolder

    with DryRunBeside(job) as beside:
        followed = dataclasses.replace(job, dry_run_follows=True)
        _run(followed, lock, is_one_of_many=is_one_of_many, max_restarts=max_restarts)
        beside.join(RunFolder(job.out))


def _print_note(note: str) -> None:
    if note:
        print(f"note: {note}", file=sys.stderr)
