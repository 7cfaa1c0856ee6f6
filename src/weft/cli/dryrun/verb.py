"""`weft dryrun`: one rank's training step on fake tensors, without devices. Exit 1 if it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import RunOrModel, Settings


def dryrun(
    run: RunOrModel = None,
    plan: Annotated[Path | None, typer.Option(help="plan.toml: the layout, of any number of ranks.")] = None,
    device: Annotated[
        str | None, typer.Option(help="The device that must hold it: H200, A100-40GB, …; CPU runs CPU kernels.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The rank to run; without, the one with the highest peak.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="KEY=V1,V2,… or KEY alone, up to the largest that fits; or microbatch[=…].")
    ] = None,
    imbalance: Annotated[
        float, typer.Option(min=1.0, help="Expert parallelism: tokens of the busiest rank, times those of an even one.")
    ] = 1.0,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")] = False,
) -> None:
    """Run the training step of one rank on fake tensors: peak memory by term, traffic, and whether it fits."""
    from weft.cli.resolve import plan_tables, require_known_sections, resolve_model
    from weft.core.plan import Plan

    given = settings or []
    require_known_sections(given)
    tables, source = plan_tables(plan, given), str(plan or "the plan")
    layout = Plan.from_tables(tables, source=source)
    spec = resolve_model(run, given, rows=layout.mesh.dp_degree * layout.pipeline.microbatches)
    from weft.cli.dryrun.question import DryRunQuestion, measure  # numpy: not for a refused command

    question = DryRunQuestion.of(spec, tables, device, source=source, imbalance=imbalance)
    if sweep is not None:
        from weft.cli.dryrun.sweep import run_sweep

        raise typer.Exit(code=run_sweep(question, sweep, rank=rank or 0, as_json=as_json))
    answer = measure(question, rank=rank)
    if as_json:
        print(json.dumps(answer.as_dict()))
    else:
        from weft.cli.dryrun import view

        view.show(answer)
    raise typer.Exit(code=1 if answer.fit is not None and not answer.fit.fits else 0)
