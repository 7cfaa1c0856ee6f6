"""Starts ranks on several hosts through ssh and waits for their end; raises one error. The entry is `launch_hosts`.

The same for one host: `weft.launch.local`. The launcher knows all hosts and decides; agents (`host_agent`) start and
end ranks.

    connect, check -> a generation (`host_generation`) -> done, or one cause -> a restart on all hosts, or those left
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable

from weft.core.errors import BadValueError, WeftError
from weft.launch.host_generation import Generation, Member, judge_hosts
from weft.launch.host_pool import HostPool, Peer
from weft.launch.hosts_request import HostsRequest
from weft.launch.stop_signals import StopSignals

_POLL_S = 0.1
# Before a restart on fewer hosts: an agent that was killed is back in a second, a rebooting host in minutes.
_RETURN_S = 6.0
_REBOOT_S = 300.0


def launch_hosts(request: HostsRequest, *, log: Callable[[str], None] | None = None) -> None:
    """Runs the request's command as ranks on its hosts; raises the one error that explains a failure.

    `log` gets lines for the user, such as restarts (default: stderr). SIGINT, SIGTERM and SIGHUP ask the ranks of all
    hosts to stop and wait for their end; a second one kills them. Bad input is never restarted.
    """
    if not request.hosts:
        raise BadValueError("no host is given", hint="--hosts gpu1:8,gpu2:8, or a file")
    say = log or _print_to_stderr
    pool = HostPool(request, log=say)
    with StopSignals() as stops:
        try:
            pool.connect(stops)
            HostJob(request, pool, stops=stops, log=say).run()
        finally:
            pool.close()


class HostJob:
    """Restarts and the choice of hosts."""

    def __init__(
        self, request: HostsRequest, pool: HostPool, *, stops: StopSignals, log: Callable[[str], None]
    ) -> None:
        self._request, self._pool, self._stops, self._log = request, pool, stops, log
        self._members = self._chosen(pool.peers)
        self._num_failures = 0

    def run(self) -> None:
        number, job = 0, f"weft-{secrets.token_hex(6)}"
        while True:
            outcome = Generation(
                self._pool,
                self._members,
                number=number,
                command=(self._request.python, *self._request.program, *self._request.command),
                job=job,
                stops=self._stops,
                wants_more=self._wants_more,
            ).run()
            number += 1
            if outcome.is_done and not (outcome.regrouped and not self._stops.count):
                return
            if outcome.is_done:
                self._members = self._chosen(self._usable())
                self._log(f"more hosts are available: continuing on {self._names()}")
            else:
                self._restart_after(judge_hosts(outcome, num_stops=self._stops.count))

    def _restart_after(self, error: WeftError) -> None:
        """Choose the hosts of the next generation; raises `error` if there is none."""
        self._num_failures += 1
        if self._stops.count or error.exit_code == 2 or self._num_failures > self._request.max_restarts:
            raise error
        members = self._await_hosts()
        if not members:
            raise error
        self._members = members
        attempt = f"{self._num_failures} of {self._request.max_restarts}"
        self._log(f"{error.message}; restarting on {self._names()} ({attempt})")

    def _await_hosts(self) -> list[Member]:
        """The members of a restart; lost hosts get a moment to answer again, or longer if too few are left."""
        started, fewest = time.monotonic(), self._fewest()
        while not self._stops.count:
            self._pool.retry_lost()
            usable, waited_s = self._usable(), time.monotonic() - started
            if len(usable) == len(self._pool.peers):
                return self._chosen(usable)
            if waited_s > _RETURN_S and len(usable) >= fewest and (members := self._chosen(usable)):
                return members
            if waited_s > _REBOOT_S:
                break
            self._pool.pump(_POLL_S)
        return []

    def _wants_more(self) -> bool:
        """Whether hosts are back that the running generation lacks, and the plan can use them."""
        if len(self._members) == len(self._pool.peers):
            return False
        self._pool.retry_lost()
        return _num_ranks(self._chosen(self._usable())) > _num_ranks(self._members)

    def _usable(self) -> list[Peer]:
        return [peer for peer in self._pool.peers if peer.is_ready]

    def _fewest(self) -> int:
        return self._request.min_hosts or len(self._pool.peers)

    def _chosen(self, peers: list[Peer]) -> list[Member]:
        """Members on `peers`, first ones first, with as many ranks as the plan can use."""
        most = sum(peer.host.num_ranks for peer in peers)
        left = self._request.fit(most) if self._request.fit is not None and len(peers) < len(self._pool.peers) else most
        members: list[Member] = []
        for peer in peers:
            taken = min(left, peer.host.num_ranks)
            if taken:
                members.append(Member(peer=peer, num_ranks=taken, first_rank=_num_ranks(members)))
            left -= taken
        return members

    def _names(self) -> str:
        names = ", ".join(member.peer.name for member in self._members)
        num_ranks = _num_ranks(self._members)
        return f"{names} ({num_ranks} rank{'s' if num_ranks > 1 else ''})"


def _num_ranks(members: list[Member]) -> int:
    return sum(member.num_ranks for member in members)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
