"""Hosts test the way to each other: connections, clocks, the shared folder. Peers run as threads of this process."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from weft.doctor import peer
from weft.doctor.check import OK, WARNING, WRONG
from weft.doctor.collect import Collected, collect, judge
from weft.doctor.peer import PortListener, connect, reachable_addresses, serve

TOKEN = "a" * 32


class ThreadLink:
    """A peer in a thread, behind pipes as ssh has them."""

    def __init__(self, host: str, first: str, events: Any) -> None:
        self.host = host
        self._events = events
        orders_read, orders_write = os.pipe()
        events_read, events_write = os.pipe()
        self._orders = os.fdopen(orders_write, "w")
        self._orders.write(first + "\n")
        self._orders.flush()
        work = (lambda: self._serve(orders_read, events_write), lambda: self._read(events_read))
        self.threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in self.threads:
            thread.start()

    def send(self, order: str, **fields: Any) -> None:
        self._orders.write(json.dumps({"order": order, **fields}) + "\n")
        self._orders.flush()

    def close(self) -> None:
        self._orders.close()
        for thread in self.threads:
            thread.join(10.0)

    def _serve(self, orders_fd: int, events_fd: int) -> None:
        with os.fdopen(orders_fd) as orders, os.fdopen(events_fd, "w") as events, suppress(SystemExit):
            serve(orders, events)

    def _read(self, events_fd: int) -> None:
        with os.fdopen(events_fd) as lines:
            for line in lines:
                self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "closed"}))


@contextmanager
def peers(folders: dict[str, Path]) -> Iterator[tuple[list[ThreadLink], Any, dict[str, str]]]:
    events: Any = queue.SimpleQueue()
    marks = {host: f".weft-doctor-{host}" for host in folders}
    links = [
        ThreadLink(host, json.dumps({"folder": str(folder), "token": TOKEN, "mark": marks[host]}), events)
        for host, folder in folders.items()
    ]
    try:
        yield links, events, marks
    finally:
        for link in links:
            link.close()


def by_name(found: Collected, *, is_folder_given: bool = True) -> dict[str, Any]:
    return {check.name: check for check in judge(found, is_folder_given=is_folder_given)}


def test_hosts_with_a_shared_folder_reach_each_other(tmp_path: Path) -> None:
    with peers({"a": tmp_path, "b": tmp_path, "c": tmp_path}) as (links, events, marks):
        found = collect(links, events, marks=marks, record_timeout_s=30.0)
        assert sorted(tmp_path.iterdir()) == [tmp_path / mark for mark in marks.values()]
    checks = by_name(found)
    assert {check.state for check in checks.values()} == {OK}, checks
    assert checks["hosts.connections"].detail.startswith("6 ways")
    assert list(found.records) == ["a", "b", "c"]
    assert not list(tmp_path.iterdir())  # peers remove their marks


def test_folders_that_are_not_shared_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with peers({"a": tmp_path / "a", "b": tmp_path / "b"}) as (links, events, marks):
        found = collect(links, events, marks=marks, record_timeout_s=30.0)
    assert by_name(found)["hosts.folder"].state == WRONG
    assert "a does not see what b writes" in by_name(found)["hosts.folder"].detail
    assert by_name(found, is_folder_given=False)["hosts.folder"].state == WARNING


def test_a_host_that_ends_early_is_lost_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[..., Any] = peer.record_of

    def fail_once(machine: Any) -> Any:
        if machine.folder.name == "gone":
            raise SystemExit
        return read(machine)

    monkeypatch.setattr(peer, "record_of", fail_once)
    with peers({"a": tmp_path, "b": tmp_path, "c": tmp_path / "gone"}) as (links, events, marks):
        found = collect(links, events, marks=marks, record_timeout_s=30.0)
    assert found.lost == ("c",)
    assert by_name(found)["hosts.connections"].detail.startswith("2 ways")


def test_a_way_that_is_closed_is_named() -> None:
    results = {
        "a": [{"host": "b", "address": "10.0.0.2", "error": "no answer"}],
        "b": [{"host": "a", "address": "10.0.0.1", "error": "", "round_trip_s": 1e-3, "offset_s": 0.0}],
    }
    check = by_name(Collected(records={"a": {}, "b": {}}, lost=(), connections=results))["hosts.connections"]
    assert check.state == WRONG
    assert check.detail == "1 of 2 ways fail: a to b (10.0.0.2): no answer"
    assert "firewall" in check.fix


def test_clocks_beyond_the_uncertainty_are_named() -> None:
    def found(offset_s: float, round_trip_s: float) -> Any:
        way = {"host": "b", "address": "x", "error": "", "round_trip_s": round_trip_s, "offset_s": offset_s}
        return by_name(Collected(records={"a": {}, "b": {}}, lost=(), connections={"a": [way], "b": []}))

    assert found(0.02, 0.001)["hosts.clocks between"].state == OK
    assert found(0.7, 1.0)["hosts.clocks between"].state == OK  # a slow link: the offset may be its delay
    off = found(-3.0, 0.01)["hosts.clocks between"]
    assert (off.state, off.detail) == (WARNING, "clocks differ from a: b -3.00 s")


def test_a_listener_answers_only_its_token() -> None:
    listener = PortListener(TOKEN, num_ports=1)
    try:
        answered = connect("127.0.0.1", listener.ports[0], token=TOKEN)
        assert (answered["error"], abs(answered["offset_s"]) < 0.5) == ("", True)
        assert connect("127.0.0.1", listener.ports[0], token="b" * 32)["error"]
    finally:
        listener.close()


def test_a_port_without_listener_is_refused() -> None:
    listener = PortListener(TOKEN, num_ports=1)
    listener.close()
    assert connect("127.0.0.1", listener.ports[0], token=TOKEN, timeout_s=2.0)["error"] in ("refused", "no answer")


def test_addresses_are_those_that_others_can_reach() -> None:
    own = {"10.0.0.1": "eth0", "10.1.0.1": "eth1", "172.17.0.1": "docker0", "127.0.0.1": "lo"}
    assert reachable_addresses(own, "eth1", "") == ["10.1.0.1", "10.0.0.1"]
    assert reachable_addresses(own, "eth1", "10.0.0.9 50000 10.0.0.1 22") == ["10.0.0.1", "10.1.0.1"]
    assert reachable_addresses({"127.0.0.1": "lo"}, "", "") == ["127.0.0.1"]
