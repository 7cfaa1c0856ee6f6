"""`weft profile`: a few steps of a run under torch's profiler, in a run folder of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import DeviceChoice, NumRanks, Settings


def profile(
    run: Annotated[
        Path | None, typer.Argument(help="run.toml, or a run folder; without it, the embedded default.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.toml: the layout of the model.")] = None,
    nproc: NumRanks = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are recorded.")] = 3,
    after: Annotated[int, typer.Option(min=1, help="Steps before them: the first ones compile and allocate.")] = 4,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="A trace of every rank, not of rank 0 alone.")] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The new run folder; default runs/profile-<model>-<time>.")] = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where to train; auto takes the GPUs when there are any.")
    ] = DeviceChoice.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print files and operators as JSON on stdout.")] = False,
) -> None:
    """Record a few training steps: a trace, the largest operators, on a GPU the allocator's history; linked in the
    report. Nothing is saved."""
    from weft.cli.early_checks import require_inputs
    from weft.cli.resolve import plan_tables, require_known_sections, resolve_run
    from weft.cli.train import is_main_rank, run_locked
    from weft.train.folder.run_folder import read_json
    from weft.train.job import Job, default_folder
    from weft.train.ranks.environment import given_ranks
    from weft.train.step_profiler import FOLDER, OPERATORS

    given = [
        *(settings or []),
        *(f"profile.{key}={value}" for key, value in (("first_step", after + 1), ("steps", steps))),
        f"profile.ranks={'all' if all_ranks else 'first'}",
        f"train.steps={after + steps}",
        "evaluation.every=0",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "ledger.measure=false",
        "ledger.dry_run=false",
    ]
    require_known_sections(given)
    if run is not None and run.is_dir():
        run, plan = run / "run.toml", plan or run / "plan.toml"
    spec, tables = resolve_run(run, given), plan_tables(plan, given)
    require_inputs(spec)
    default = default_folder(spec)
    outside = given_ranks(os.environ)
    job = Job.create(
        run=spec,
        plan_tables=tables,
        num_ranks=outside if outside is not None else nproc,
        out=out or default.with_name(f"profile-{default.name}"),
        device=device.value,
        source=str(plan or "the plan"),
    )
    run_locked(job)
    if as_json and is_main_rank():
        files = sorted(f"{FOLDER}/{path.name}" for path in (job.out / FOLDER).iterdir())
        print(json.dumps({"run_dir": str(job.out), "files": files, **read_json(job.out / FOLDER / OPERATORS)}))
