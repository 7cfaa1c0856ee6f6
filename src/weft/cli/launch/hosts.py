"""`weft launch --on hosts`: a training on a list of hosts over ssh, from the verb's words and the site's settings."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.launch.inner import InnerVerb

if TYPE_CHECKING:
    from weft.launch.hosts_request import HostsRequest
    from weft.launch.places.request import LaunchFile
    from weft.launch.places.settings import LaunchSettings


def hosts_request(
    inner: InnerVerb, hosts: str | None, *, ranks_per_node: int | None, settings: LaunchSettings
) -> HostsRequest:
    """The checked request: the plan is legal on all ranks of the hosts."""
    from weft.cli.launch.sizes import plan_tables_of, require_resolvable
    from weft.cli.resolve import resolve_run
    from weft.core.errors import BadValueError
    from weft.launch.host_list import read_hosts
    from weft.launch.hosts_request import HostsRequest
    from weft.plan.resolve import most_ranks
    from weft.train.job import default_folder, imports_of

    given = hosts or settings.hosts.list
    if inner.verb != ("train",) or not given:
        problem = "--on hosts starts `weft train` only" if given else "--on hosts has no hosts"
        raise BadValueError(
            problem, hint="weft launch --on hosts --hosts gpu1:8,gpu2:8 -- train run.toml --out runs/big"
        )
    found = read_hosts(given, ranks_per_host=ranks_per_node)
    require_resolvable(inner, num_ranks=sum(host.num_ranks for host in found), on_gpu=False)
    tables, spec = plan_tables_of(inner), resolve_run(inner.path("run"), inner.settings)
    out = inner.path("out") or default_folder(spec)
    own = ["--continue"] if inner.values.get("continues") else []
    site = settings.hosts
    return HostsRequest(
        hosts=found,
        command=(*inner.verb, *inner.arguments, "--out", str(out), *own),
        folder=out,
        imports=tuple(imports_of(spec)),
        ssh_options=site.ssh_options,
        python=settings.job.python or sys.executable,
        environment=settings.job.environment,
        connect_timeout_s=site.connect_timeout_s,
        lease_s=site.lease_s,
        max_restarts=int(inner.values.get("max_restarts") or 0),
        min_hosts=site.min_hosts or None,
        fit=lambda limit: most_ranks(tables, spec, limit),
    )


def write_hosts(request: HostsRequest) -> LaunchFile:
    """The commands that --submit runs, one per host, and what their ranks run."""
    from weft.launch.host_pool import connection_command
    from weft.launch.places.request import LaunchFile, shell

    lines, first = [], 0
    for host in request.hosts:
        last = first + host.num_ranks - 1
        lines.append(f"# ranks {first} to {last}\n{shell(connection_command(request, host.name))}\n")
        first = last + 1
    ranks = shell([request.python, *request.program, *request.command])
    return LaunchFile(name="hosts.sh", text=f"# each rank: {ranks}\n{''.join(lines)}")


def run_on_hosts(request: HostsRequest) -> str:
    """Until the training ends; stdout is left to the answer of the launch."""
    from weft.launch.hosts import launch_hosts

    with contextlib.redirect_stdout(sys.stderr):
        launch_hosts(request)
    return str(Path(request.folder or "."))
