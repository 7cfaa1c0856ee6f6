"""`weft doctor --hosts`: a record of each host over ssh, their differences, and the tests between them."""

from __future__ import annotations

import dataclasses
import os
import queue
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from weft.doctor import bench as benchmarks
from weft.doctor.check import Diagnosis, wrong
from weft.doctor.collect import Collected, collect, judge
from weft.doctor.compare import compare
from weft.doctor.examine import checks_of
from weft.doctor.situation import Situation
from weft.launch.host_list import Host, read_hosts
from weft.launch.ssh import SshLink, ssh_command

_PEER = "weft.doctor.peer"
_CONNECT_S = 10.0
_RECORD_S, _BENCH_S = 60.0, 360.0


def examine_hosts(
    hosts: str, *, ssh: Sequence[str], num_ranks: int | None, out: Path | None, bench: bool
) -> list[Diagnosis]:
    """Differences and tests between hosts first, then the checks of each host."""
    listed = read_hosts(hosts, ranks_per_host=num_ranks or 1)
    ranks = {host.name: host.num_ranks if num_ranks or host.num_ranks > 1 else None for host in listed}
    with Console(file=sys.stderr).status(f"asking {len(listed)} hosts …") as status:
        found, checks = _ask(listed, ranks, ssh, out or Path("runs"), bench=bench, show=status.update)
    records = list(found.records.values())
    if len(records) > 1:
        checks += compare(records)
        checks += judge(found, is_folder_given=out is not None)
    checks += benchmarks.judge(records)
    for name, record in found.records.items():
        own = checks_of(record, Situation(num_ranks=ranks[name], is_cluster=len(listed) > 1))
        checks += [dataclasses.replace(check, host=name) for check in own]
    return checks


def _ask(
    listed: Sequence[Host],
    ranks: dict[str, int | None],
    ssh: Sequence[str],
    out: Path,
    *,
    bench: bool,
    show: Callable[[str], None],
) -> tuple[Collected, list[Diagnosis]]:
    """The answers, and a diagnosis for each host without one."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    token = secrets.token_hex(16)
    marks = {host.name: f".weft-doctor-{token[:8]}-{place}" for place, host in enumerate(listed)}
    links: list[SshLink] = []
    try:
        for host in listed:
            command = ssh_command(
                host.name,
                ssh=ssh,
                options=(),
                python=sys.executable,
                directory=os.getcwd(),
                connect_timeout_s=_CONNECT_S,
                module=_PEER,
            )
            first = {
                "folder": str(out.absolute()),
                "token": token,
                "mark": marks[host.name],
                "bench": bench,
                "num_ranks": ranks[host.name],
            }
            links.append(SshLink(host.name, command, first=first, events=events))
        limit_s = _BENCH_S if bench else _RECORD_S
        found = collect(links, events, marks=marks, record_timeout_s=limit_s, show=show)
        return found, [_lost(link) for link in links if link.host in found.lost]
    finally:
        for link in links:
            link.close(patience_s=3.0)


def _lost(link: SshLink) -> Diagnosis:
    error = link.error()
    return wrong("hosts.reachable", error.message, error.hint or "see what `ssh HOST` says")
