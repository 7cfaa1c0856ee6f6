"""`weft doctor`: checks of this machine before a run. Exit 0 when nothing is wrong, 1 otherwise."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import NumRanks

if TYPE_CHECKING:  # imported inside the verb, to keep `weft --help` fast
    from weft.doctor.check import Diagnosis

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "unknown": "dim"}


def doctor(
    hosts: Annotated[
        str | None, typer.Option(help="Hosts to examine over ssh: a,b or a file with one per line.")
    ] = None,
    nproc: NumRanks = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run: its disk is checked. [default: runs]")] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Measure each device and a small all-reduce too.")] = False,
    ssh: Annotated[str, typer.Option(help="The command of ssh, with options.")] = "ssh",
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON on stdout.")] = False,
) -> None:
    """Check GPUs, fabric, network, limits, versions and disk of this machine, or of several hosts and between them."""
    from weft.doctor.check import WRONG, worst_first

    if hosts is None:
        checks = _examine_this(nproc, out or Path("runs"), bench=bench)
    else:
        from weft.cli.doctor_hosts import examine_hosts

        checks = examine_hosts(hosts, ssh=shlex.split(ssh), num_ranks=nproc, out=out, bench=bench)
    checks = worst_first(checks)
    if as_json:
        print(json.dumps({"checks": [check.as_dict() for check in checks]}))
    else:
        print_table(checks)
    raise typer.Exit(code=1 if any(check.state == WRONG for check in checks) else 0)


def _examine_this(num_ranks: int | None, out: Path, *, bench: bool) -> list[Diagnosis]:
    from rich.console import Console

    from weft.doctor.bench import judge, measure
    from weft.doctor.examine import checks_of, is_of_cluster, record_of
    from weft.doctor.machine import this_machine
    from weft.doctor.situation import Situation

    record = record_of(this_machine(out))
    checks = checks_of(record, Situation(num_ranks=num_ranks, is_cluster=is_of_cluster(record)))
    if bench:
        with Console(file=sys.stderr).status("measuring devices and an all-reduce …"):
            record["bench"] = measure(num_ranks)
    return checks + list(judge([record]))


def print_table(checks: Sequence[Diagnosis]) -> None:
    """One row per check, what is wrong first, then one line with the counts. Of single hosts, what is ok is counted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    with_hosts = any(check.host for check in checks)
    for check in checks:
        if check.host and check.state == "ok":
            continue
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\nfix: {check.fix}", style="bold")
        host = [Text(check.host)] if with_hosts else []
        table.add_row(Text(check.state, style=_COLOURS[check.state]), *host, Text(check.name), detail)
    console = Console(soft_wrap=False)
    console.print(table)
    counts = {state: sum(check.state == state for check in checks) for state in _COLOURS}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count), style="bold")
