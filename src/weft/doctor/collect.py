"""Records of several hosts, and the tests between them, over links that the caller has opened (ssh).

record of each -> connections each way -> marks in the run folder -> diagnoses
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.doctor.check import Diagnosis, ok, shortened, warning, wrong

_CONNECT_S = 60.0
_LARGE_OFFSET_S = 0.5
_REASONS = {
    "no answer": "packets are dropped: open the ports between the hosts in the firewall or security group",
    "refused": "rejected: open the ports between the hosts in the firewall",
}


class PeerLink(Protocol):
    """A connection to the doctor's peer on a host; events arrive in a queue as (link, message)."""

    @property
    def host(self) -> str: ...

    def send(self, order: str, **fields: Any) -> None: ...


Events = queue.SimpleQueue[tuple[Any, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """`records` by the hosts' names in the list; `lost`: hosts without an answer. `connections`, `seen`: by host."""

    records: dict[str, dict[str, Any]]
    lost: tuple[str, ...]
    connections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)


def collect(
    links: Sequence[PeerLink],
    events: Events,
    *,
    marks: Mapping[str, str],
    record_timeout_s: float,
    show: Callable[[str], None] = lambda text: None,
) -> Collected:
    """Wait for the records, then let the hosts that answered test the way to each other."""
    answers = _gather(links, events, "record", record_timeout_s, show)
    alive = [link for link in links if link.host in answers]
    records = {host: {**answer["record"], "host": host} for host, answer in answers.items()}
    lost = tuple(link.host for link in links if link.host not in answers)
    if len(alive) < 2:
        return Collected(records=records, lost=lost)
    peers = [
        {"host": link.host, "addresses": answers[link.host]["addresses"], "ports": answers[link.host]["ports"]}
        for link in alive
    ]
    for link in alive:
        link.send("connect", peers=[peer for peer in peers if peer["host"] != link.host])
    connections = _gather(alive, events, "connections", _CONNECT_S, show)
    for link in alive:
        link.send("look", marks=list(marks.values()))
    seen = _gather(alive, events, "seen", _CONNECT_S, show)
    return Collected(
        records=records,
        lost=lost,
        connections={host: answer["results"] for host, answer in connections.items()},
        seen={host: answer["marks"] for host, answer in seen.items()},
        marks=marks,
    )


def _gather(
    links: Sequence[PeerLink], events: Events, wanted: str, timeout_s: float, show: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """The event of that name from each link, in the order of links; hosts that are closed or late are left out."""
    found: dict[str, dict[str, Any]] = {}
    open_hosts, deadline = {link.host for link in links}, time.monotonic() + timeout_s
    while open_hosts:
        show(f"{wanted}: {len(found)} of {len(links)} hosts")
        try:
            link, message = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if message.get("event") == wanted:
            found[link.host] = message
            open_hosts.discard(link.host)
        elif message.get("event") == "closed":
            open_hosts.discard(link.host)
    return {link.host: found[link.host] for link in links if link.host in found}


def judge(found: Collected, *, is_folder_given: bool) -> Iterator[Diagnosis]:
    """What the tests between hosts say."""
    if len(found.records) < 2:
        return
    yield _ways(found.connections)
    yield _clocks(found.connections)
    yield _folder(found, is_folder_given)


def _ways(connections: dict[str, list[dict[str, Any]]]) -> Diagnosis:
    name = "hosts.connections"
    failed = [(host, result) for host, results in connections.items() for result in results if result["error"]]
    total = sum(map(len, connections.values()))
    if not failed:
        slowest = max((result["round_trip_s"] for results in connections.values() for result in results), default=0.0)
        return ok(name, f"{total} ways, each on random ports; slowest round trip {slowest * 1e3:.1f} ms")
    ways = shortened(f"{host} to {each['host']} ({each['address']}): {each['error']}" for host, each in failed)
    fix = _REASONS.get(
        failed[0][1]["error"], "see the route between the hosts; NCCL and Gloo use random ports each way"
    )
    return wrong(name, f"{len(failed)} of {total} ways fail: {ways}", fix)


def _clocks(connections: dict[str, list[dict[str, Any]]]) -> Diagnosis:
    """Offsets against the first host that reached others, beyond the uncertainty of half a round trip."""
    name = "hosts.clocks between"
    host, results = next(((host, each) for host, each in connections.items() if each), ("", []))
    known = {each["host"]: each for each in results if not each["error"]}
    off = [
        f"{other} {each['offset_s']:+.2f} s"
        for other, each in known.items()
        if abs(each["offset_s"]) - each["round_trip_s"] / 2 > _LARGE_OFFSET_S
    ]
    if off:
        fix = "start chronyd or systemd-timesyncd on all hosts: logs and time limits do not line up"
        return warning(name, f"clocks differ from {host}: {shortened(off)}", fix)
    most = max((abs(each["offset_s"]) for each in known.values()), default=0.0)
    return ok(name, f"clocks differ by at most {most * 1e3:.0f} ms" if known else "not measured")


def _folder(found: Collected, is_folder_given: bool) -> Diagnosis:
    name = "hosts.folder"
    folders = {record["disk"]["folder"] for record in found.records.values() if "disk" in record}
    blind = {
        host: [other for other in found.records if found.marks.get(other) not in marks]
        for host, marks in found.seen.items()
    }
    missing = [f"{host} does not see what {others[0]} writes" for host, others in blind.items() if others]
    if not missing:
        return ok(name, f"{', '.join(sorted(folders))} is one folder on all hosts")
    fix = "--out on a file system that all hosts share: checkpoints are one folder"
    make = wrong if is_folder_given else warning
    return make(name, f"{', '.join(sorted(folders))} is not shared: {shortened(missing)}", fix)
