"""`weft schedule`: draw a pipeline schedule, as a grid on the terminal and as an SVG picture. No torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import write_text


def schedule(
    name: Annotated[str, typer.Argument(help="1f1b, interleaved_1f1b, zero_bubble, zbv, …")],
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 8,
    out: Annotated[Path | None, typer.Option(help="The SVG file; default NAME-STAGESxMICROBATCHES.svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the grid and its figures as JSON on stdout.")] = False,
) -> None:
    """Draw a pipeline schedule with equal stages: its timeline, its bubble, the micro-batches in flight per rank."""
    from weft import schedule as schedules
    from weft.core.errors import BadValueError
    from weft.schedule.registry import spec_of

    if name not in schedules.NAMES:
        raise BadValueError(f"there is no schedule {name!r}", hint=" | ".join(schedules.NAMES))
    virtual_stages = 1 if spec_of(name).virtual_stages == (1, 1) else 2
    sizes = {"num_ranks": stages, "num_microbatches": microbatches, "virtual_stages": virtual_stages}
    reasons = schedules.check_request(name, **sizes)
    if reasons:
        raise BadValueError(f"{name}: {reasons[0]}", hint="try other --stages or --microbatches")
    timeline = schedules.simulate(schedules.generate(name, **sizes))
    in_flight = schedules.count_in_flight(timeline.schedule).by_rank_until_weight
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    grid = schedules.draw_grid(timeline, columns=columns)
    grid += f"micro-batches in flight at most, by rank: {', '.join(map(str, in_flight))}"
    if as_json:
        print(json.dumps({"grid": grid, "bubble_share": timeline.bubble_share, "in_flight_by_rank": list(in_flight)}))
    else:
        print(grid)
        out = out or Path(f"{name}-{stages}x{microbatches}.svg")
    if out is not None:
        write_text(out, schedules.draw_svg(timeline))
