"""One generation of ranks over several hosts: meet, start, watch, end; the verdict is `judge_hosts`.

the first host serves the store -> the others connect -> ranks run -> all end, or one fails or a host is lost -> the
others are told to end -> ends of all ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.core.errors import HostLostError, HostsError, WeftError
from weft.launch.cause import RankEnd, find_cause, is_certain, judge
from weft.launch.host_link import Message
from weft.launch.host_pool import HostPool, Peer
from weft.launch.meeting import choose_address
from weft.launch.stop_signals import StopCount

_POLL_S = 0.1
_MEET_S = 15.0
_START_S = 300.0  # importing torch from a busy shared disk
_END_S = 30.0  # a host whose ranks cannot be killed in this time counts as lost


@dataclass(frozen=True, kw_only=True)
class Member:
    """A host of a generation, and its ranks in the job."""

    peer: Peer
    num_ranks: int
    first_rank: int

    @property
    def ranks(self) -> str:
        last = self.first_rank + self.num_ranks - 1
        return f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank} to {last}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`losses`: sentences about lost hosts. `regrouped`: it was stopped because more hosts are available."""

    ends: tuple[RankEnd, ...]
    losses: tuple[str, ...]
    regrouped: bool

    @property
    def is_done(self) -> bool:
        return not self.losses and all(end.exit_code == 0 and end.record is None for end in self.ends)


def judge_hosts(outcome: Outcome, *, num_stops: int) -> WeftError:
    """The one error of a failed generation: a certain cause of a rank, else the lost host."""
    if outcome.losses and not is_certain(find_cause(outcome.ends)):
        return HostLostError(
            "; ".join(outcome.losses),
            hint="--max-restarts restarts such a job, with --min-hosts also on fewer hosts; --resume continues it",
        )
    return judge(outcome.ends, num_stops=num_stops)


class _LostHostError(Exception):
    """A member was lost before the ranks of all hosts had started."""


class Generation:
    def __init__(
        self,
        pool: HostPool,
        members: Sequence[Member],
        *,
        number: int,
        command: Sequence[str],
        job: str,
        stops: StopCount,
        wants_more: Callable[[], bool],
    ) -> None:
        """`wants_more`: whether to stop, with a checkpoint, because more hosts are available."""
        self._pool, self._members, self._number = pool, list(members), number
        self._command, self._job, self._stops, self._wants_more = tuple(command), job, stops, wants_more
        self._ends: dict[Peer, list[RankEnd]] = {}
        self._heard: dict[str, dict[Peer, Message]] = {}
        self._num_stops_sent = 0
        self._regroups = False
        self._ending_since: float | None = None

    def run(self) -> Outcome:
        self._pool.log_host = self._members[0].peer
        try:
            self._start()
        except _LostHostError:
            self._end()
        while not all(member.peer in self._ends or not member.peer.is_open for member in self._members):
            self._tick()
            if not self._stops.count and not self._regroups and self._ending_since is None and self._wants_more():
                self._regroups = True
        losses = [
            f"{member.peer.name} ({member.ranks}) was lost: {member.peer.why_lost}"
            for member in self._members
            if member.peer not in self._ends
        ]
        ends = [end for member in self._members for end in self._ends.get(member.peer, [])]
        return Outcome(ends=tuple(ends), losses=tuple(losses), regrouped=self._regroups)

    # ------------------------------------------------------------------------------------------------------- start

    def _start(self) -> None:
        address, interfaces = self._meet()
        first, *others = self._members
        self._order_start(first, address=address, port=None, interface=interfaces[first.peer])
        port = int(self._await("store", [first.peer], _START_S)[first.peer]["port"])
        for member in others:
            self._order_start(member, address=address, port=port, interface=interfaces[member.peer])

    def _meet(self) -> tuple[str, dict[Peer, str | None]]:
        """The address of the store, and each host's interface on the way to it."""
        first, *others = [member.peer for member in self._members]
        if not others:
            return "127.0.0.1", {first: "lo" if "lo" in first.addresses.values() else None}
        first.link.send("listen")
        door = self._await("listening", [first], _MEET_S)[first]
        for peer in others:
            peer.link.send("reach", addresses=list(first.addresses), port=door["port"], token=door["token"])
        answers = self._await("reached", others, _MEET_S)
        reached = {peer.name: answers[peer]["addresses"] for peer in others}
        address = choose_address(list(first.addresses), reached)
        if address is None:
            raise _unreachable(first, reached)
        return address, {first: first.addresses[address], **{peer: reached[peer.name][address] for peer in others}}

    def _order_start(self, member: Member, *, address: str, port: int | None, interface: str | None) -> None:
        member.peer.link.send("stop", count=self._num_stops_sent)  # those of an earlier generation are over
        member.peer.link.send(
            "start",
            generation=self._number,
            command=self._command,
            num_ranks=member.num_ranks,
            host_rank=self._members.index(member),
            num_hosts=len(self._members),
            address=address,
            port=port,
            interface=interface,
            job=self._job,
        )

    def _await(self, event: str, peers: Sequence[Peer], timeout_s: float) -> dict[Peer, Message]:
        heard = self._heard.setdefault(event, {})
        deadline = time.monotonic() + timeout_s
        while not all(peer in heard for peer in peers):
            self._tick()
            late = [peer for peer in peers if peer not in heard]
            if time.monotonic() > deadline:
                self._pool.give_up(late[0], f"it has not answered for {timeout_s:.0f} s")
            if self._ending_since is not None or any(not peer.is_open or peer in self._ends for peer in late):
                raise _LostHostError
        return heard

    # ------------------------------------------------------------------------------------------------------- watch

    def _tick(self) -> None:
        found = self._pool.pump(_POLL_S)
        if found is not None:
            self._take(*found)
        if any(not member.peer.is_open for member in self._members):
            self._end()
        wanted = max(self._stops.count, int(self._regroups))
        if wanted > self._num_stops_sent:
            self._num_stops_sent = wanted
            self._tell("stop", count=wanted)
        if self._ending_since is not None and time.monotonic() - self._ending_since > _END_S:
            for peer in self._running():
                self._pool.give_up(peer, f"it has not ended its ranks in {_END_S:.0f} s")

    def _take(self, peer: Peer, message: Message) -> None:
        event = message["event"]
        if message.get("generation", self._number) != self._number:
            return
        self._heard.setdefault(event, {})[peer] = message
        if event == "failing":
            self._end(grace_s=message["grace_s"])
        elif event == "ended":
            self._ends[peer] = [RankEnd.from_fields(fields, host=peer.name) for fields in message["ends"]]

    def _end(self, *, grace_s: float = 0.0) -> None:
        """Tell all hosts to end their ranks: after a failure on one of them, or its loss. `grace_s`: for their records,
        while the cause may still be among them."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._tell("end", generation=self._number, grace_s=grace_s)

    def _tell(self, order: str, **fields: float) -> None:
        for peer in self._running():
            peer.link.send(order, **fields)

    def _running(self) -> list[Peer]:
        return [member.peer for member in self._members if member.peer.is_open and member.peer not in self._ends]


def _unreachable(first: Peer, reached: dict[str, dict[str, str | None]]) -> HostsError:
    deaf = [name for name, found in reached.items() if not found] or list(reached)
    return HostsError(
        f"{deaf[0]} cannot connect to {first.name} at any of its addresses: {', '.join(first.addresses)}",
        hint="ranks need TCP connections between all hosts, on any port: see firewalls, routes and VPNs",
    )
