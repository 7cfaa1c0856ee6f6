"""`weft report`: draw the report of a run folder, or the learning rate of a run.toml before the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run folder; or a run.toml, whose learning rate is drawn.")],
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--beside", metavar="<path>", help="Another run on parameter servers, drawn in the same charts; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON on stdout.")] = False,
) -> None:
    """Draw a run: one self-contained page with curves, memory, dtypes and coverage.

    For a run on parameter servers: curves, staleness, load of servers and workers, hot keys and restarts. For a
    run.toml: the learning rate of every step before the run, here and as a page beside the file.
    """
    from weft.report import write_report

    if run.suffix == ".toml":
        _draw_schedule(run, as_json=as_json)
        return
    page = write_report(run, beside=beside or [])
    if as_json:
        print(json.dumps({"report": str(page)}))
    else:
        print(f"open {page}", file=sys.stderr)


def _draw_schedule(path: Path, *, as_json: bool) -> None:
    from weft.core.run_spec import RunSpec
    from weft.report.page import write_page
    from weft.report.rates import draw_rates, rates_page
    from weft.train.rate import groups_in_words, learning_rate_at

    train = RunSpec.from_file(path).train
    rates = [learning_rate_at(train, step) for step in range(1, train.steps + 1)]
    title = f"{train.schedule} schedule of {train.optimizer}, {train.steps:,} steps"
    page = rates_page(rates, title=title, groups=groups_in_words(train))
    target = write_page(page, path.with_name(f"{path.stem}-schedule.html"), hint="check space and permissions")
    if as_json:
        print(json.dumps({"report": str(target), "learning_rates": rates}))
    else:
        print(draw_rates(rates, title=title))
        print(f"open {target}", file=sys.stderr)
