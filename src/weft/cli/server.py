"""`weft server`: train on parameter servers, status of a run, benchmark, export of tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.core.extras import require_extra

if TYPE_CHECKING:  # imported inside the verbs, to keep `weft --help` fast
    from weft.core.server_spec import ServerRun

server_app = typer.Typer(
    name="server",
    help="Train models with huge embedding tables on parameter servers: sync, async or geo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@server_app.command()
def train(
    run: Annotated[Path | None, typer.Argument(help="run.toml; without it, a click model on a generated log.")] = None,
    servers: Annotated[int | None, typer.Option(min=1, help="Server processes.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes.")] = None,
    mode: Annotated[str | None, typer.Option(help="sync | async | geo")] = None,
    staleness: Annotated[str | None, typer.Option(help="async: steps ahead of the slowest, or 'free'.")] = None,
    launcher: Annotated[str | None, typer.Option(help="processes | ray | in_process")] = None,
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster; implies --launcher ray.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of run.toml; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to make; default runs/<model>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to continue, on any number of servers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's ledger as JSON on stdout.")] = False,
) -> None:
    """Train. Without arguments: a DeepFM on a generated click log, on this machine."""
    from weft.cli.early_checks import require_server_inputs
    from weft.core.errors import BadValueError

    if resume is not None and (run is not None or out is not None):
        raise BadValueError(
            "--resume continues in its own folder with its own run.toml", hint="change values with --set"
        )
    if address is not None:
        launcher = launcher or "ray"
    given = {"servers": servers, "workers": workers, "mode": mode, "staleness": staleness, "launcher": launcher}
    source = run if resume is None else _run_file(resume)
    spec = resolve(source, [*(settings or []), *_as_settings(given)])
    require_server_inputs(spec, is_resumed=resume is not None)
    from weft.server.job.driver import run_job

    target = resume or out or _default_out(spec)
    ledger = run_job(spec, target, resume=resume is not None, address=address)
    if as_json:
        print(json.dumps(ledger))


@server_app.command()
def status(
    run: Annotated[Path, typer.Argument(help="The folder of a running or ended run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Show the status of a run: steps, workers, rows and load of each server."""
    from weft.server.job.status import read_status, status_table

    found = read_status(run)
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    Console(file=sys.stderr, soft_wrap=True).print(status_table(found))


@server_app.command()
def join(run: Annotated[Path, typer.Argument(help="The folder of a running run.")]) -> None:
    """Add a worker in this process, until the run ends; it may leave at any time."""
    require_extra("numba")
    from weft.core.quiet import quiet_libraries
    from weft.server.job.status import join_live

    quiet_libraries()
    join_live(run)
    print("the run has ended", file=sys.stderr)


@server_app.command()
def bench(
    rows: Annotated[int, typer.Option(min=300_000, help="Rows of the table.")] = 4_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Measure rows per second over loopback, beside raw TCP and the kernel of the table."""
    require_extra("numba")
    from weft.server.bench import bench_table, run_bench

    records = run_bench(rows=rows, rounds=rounds, log=lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps({"rows": rows, "rounds": rounds, "figures": [record.as_dict() for record in records]}))
        return
    from rich.console import Console

    Console(file=sys.stderr, soft_wrap=True).print(bench_table(records))


@server_app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of an ended run.")],
    out: Annotated[
        Path, typer.Option(help="The folder to make: keys and rows as .npy, dense parameters as safetensors.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON on stdout.")] = False,
) -> None:
    """Export the tables of a run: keys and rows, from any number of servers."""
    require_extra("numba")
    from weft.server.job.export import export_tables

    written = export_tables(run, out)
    if as_json:
        print(json.dumps(written))
    else:
        for name, table in written["tables"].items():
            print(f"{table['path']}: {table['rows']:,} rows of {name}", file=sys.stderr)


def resolve(path: Path | None, settings: list[str]) -> ServerRun:
    """The run of a file, or the embedded default, with settings applied."""
    from weft.cli.resolve import require_known_sections
    from weft.core.config import apply_settings, read_toml
    from weft.core.server_spec import SECTIONS, ServerRun

    require_known_sections(settings, known=SECTIONS)
    tables = apply_settings(read_toml(path) if path is not None else {}, settings)
    return ServerRun.from_tables(tables, source=str(path) if path is not None else "the embedded default")


def _as_settings(given: dict[str, Any]) -> list[str]:
    return [f"server.{key}={value}" for key, value in given.items() if value is not None]


def _run_file(folder: Path) -> Path:
    from weft.core.errors import RunFolderError

    if not (folder / "run.toml").is_file():
        raise RunFolderError(f"{folder} is not a run folder: it has no run.toml", hint="give the folder of a run")
    return folder / "run.toml"


def _default_out(spec: ServerRun) -> Path:
    from datetime import datetime

    return Path("runs") / f"{spec.model.kind}-{datetime.now():%Y%m%d-%H%M%S}"
