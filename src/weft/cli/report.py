"""`weft report`: draw the report of a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--beside", metavar="<path>", help="Another run on parameter servers, drawn in the same charts; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON on stdout.")] = False,
) -> None:
    """Draw a run: one self-contained page with curves, memory, dtypes and coverage.

    For a run on parameter servers: curves, staleness, load of servers and workers, hot keys and restarts.
    """
    from weft.report import write_report

    page = write_report(run, beside=beside or [])
    if as_json:
        print(json.dumps({"report": str(page)}))
    else:
        print(f"open {page}", file=sys.stderr)
