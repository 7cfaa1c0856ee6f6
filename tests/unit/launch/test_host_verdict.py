"""The one error of several hosts, and the hosts and ranks of a restart."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.core.errors import HostLostError, RankError
from weft.launch.cause import RankEnd
from weft.launch.host_generation import Outcome, judge_hosts
from weft.launch.host_list import read_hosts
from weft.launch.hosts import HostJob
from weft.launch.hosts_request import HostsRequest
from weft.launch.stop_signals import StopSignals
from weft.train.ranks.failures import FailureRecord

LOSS = "host2 (ranks 2 to 3) was lost: its link has been silent for 8 s"


def end(rank: int, *, code: int = 0, secondary: bool | None = None, phase: str = "step 4") -> RankEnd:
    record = None
    if secondary is not None:
        fields: dict[str, str | int] = {"error": "RankError", "code": "W701", "message": "boom", "exit_code": 3}
        record = FailureRecord(
            rank=rank,
            world_size=4,
            phase=phase,
            time=time.time(),
            secondary=secondary,
            traceback="",
            error_fields=fields,
        )
    return RankEnd(
        rank=rank, pid=9, exit_code=code, killed_by_launcher=False, record=record, host=f"host{rank // 2 + 1}"
    )


def outcome(*ends: RankEnd, losses: tuple[str, ...] = ()) -> Outcome:
    return Outcome(ends=ends, losses=losses, regrouped=False)


def test_a_rank_is_named_with_its_host() -> None:
    killed = judge_hosts(outcome(end(1, code=3, secondary=True), end(3, code=-signal.SIGKILL)), num_stops=0)
    assert killed.message == "rank 3 on host2 (pid 9) was killed by SIGKILL"
    failed = judge_hosts(outcome(end(0, code=3, secondary=True), end(2, code=3, secondary=False)), num_stops=0)
    assert failed.message == "rank 2 on host2 failed in step 4: boom"


def test_a_lost_host_explains_lost_peers_but_no_error_of_their_own() -> None:
    lost = judge_hosts(outcome(end(0, code=3, secondary=True), end(1), losses=(LOSS,)), num_stops=0)
    assert isinstance(lost, HostLostError)
    assert lost.message == LOSS
    own = judge_hosts(outcome(end(0, code=3, secondary=False), end(1), losses=(LOSS,)), num_stops=0)
    assert isinstance(own, RankError)
    assert own.message == "rank 0 on host1 failed in step 4: boom"


def test_only_a_generation_without_failure_or_loss_is_done() -> None:
    assert outcome(end(0), end(1)).is_done
    assert not outcome(end(0), end(1, code=3)).is_done
    assert not outcome(end(0), losses=(LOSS,)).is_done


def test_ends_travel_as_json_fields() -> None:
    for given in (end(3, code=-9), end(1, code=3, secondary=True)):
        assert RankEnd.from_fields(given.to_fields(), host=given.host) == given


@dataclass
class Peer:
    host: Any
    name: str = ""
    is_ready: bool = True
    is_open: bool = True
    facts: dict[str, str] = field(default_factory=dict)


@dataclass
class Pool:
    peers: list[Peer]


def job(**fields: Any) -> tuple[HostJob, list[Peer]]:
    request = HostsRequest(hosts=read_hosts("a:4,b:4,c:4"), command=("train",), **fields)
    peers = [Peer(host=host, name=host.name) for host in request.hosts]
    return HostJob(request, Pool(peers), stops=StopSignals(), log=lambda line: None), peers  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "fit", "found"),
    [
        ((), lambda most: most, [("a", 0, 4), ("b", 4, 4), ("c", 8, 4)]),
        ((1,), lambda most: most, [("a", 0, 4), ("c", 4, 4)]),
        ((0,), lambda most: 6, [("b", 0, 4), ("c", 4, 2)]),
        ((0,), lambda most: 4, [("b", 0, 4)]),
        ((0,), lambda most: 0, []),
    ],
)
def test_the_hosts_that_are_left_take_as_many_ranks_as_the_plan_can_use(
    lost: tuple[int, ...], fit: Any, found: list[tuple[str, int, int]]
) -> None:
    hosts, peers = job(fit=fit, min_hosts=1)
    for place in lost:
        peers[place].is_ready = False
    members = hosts._chosen(hosts._usable())
    assert [(member.peer.name, member.first_rank, member.num_ranks) for member in members] == found
