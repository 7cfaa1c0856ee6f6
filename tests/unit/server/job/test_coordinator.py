"""The coordinator's answers: joining, reports, settling, holds, the end, failures, endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import DataError, WireError, WorkerError
from weft.server.job.coordinator import Coordinator, UnitReport
from weft.server.units import Leases


def _coordinator(*, end: int = 4, shares: int = 2, hold: int | None = None) -> Coordinator:
    ticks = iter(range(10**6))

    def clock() -> float:
        return float(next(ticks))  # every look is a second later: nobody waits for real

    coordinator = Coordinator(assignment={"out": "x"}, clock=clock)
    leases = Leases(shares=shares, first=0, end=end, gate=None, lease_s=1e9, clock=clock)
    leases.hold = end if hold is None else hold
    coordinator.begin(leases)
    return coordinator


def _next(coordinator: Coordinator, worker: str = "w", *, done: tuple[int, ...] = (), held: int = 0) -> dict[str, Any]:
    reports = [
        UnitReport(unit=unit, loss_sum=1.0, weight=2.0, compute_s=0.5, wait_s=0.1, staleness=(3,)).as_dict()
        for unit in done
    ]
    return coordinator.answer("next", {"worker": worker, "finished": reports, "held": held})


def test_a_worker_joins_with_the_assignment_and_a_client_number_never_used_before() -> None:
    coordinator = _coordinator()
    first, second, again = (coordinator.answer("join", {"name": name}) for name in ("a", "b", "a"))
    assert (first["out"], first["rank"], second["rank"], again["rank"]) == ("x", 0, 1, 0)
    assert len({coordinator.client_id, first["client_id"], second["client_id"], again["client_id"]}) == 4


def test_what_comes_back_was_lost_whether_a_launcher_says_so_or_not() -> None:
    coordinator = _coordinator()
    coordinator.answer("join", {"name": "w"})
    coordinator.answer("join", {"name": "w"})
    coordinator.lost("w")
    coordinator.answer("join", {"name": "w"})
    for _ in range(2):
        coordinator.answer("register", {"server": 0, "host": "10.0.0.7", "port": 1})
    coordinator.forget_server(0)
    coordinator.answer("register", {"server": 0, "host": "10.0.0.8", "port": 1})
    events = [(event["event"], event.get("host")) for event in coordinator.events]
    assert events.count(("worker lost", None)) == 2
    assert events.count(("server lost", None)) == 2
    assert [host for what, host in events if what == "server up"] == ["10.0.0.7", "10.0.0.7", "10.0.0.8"]


@pytest.mark.parametrize("is_back", [False, True])
def test_a_question_that_outlives_its_worker_is_given_no_unit(is_back: bool) -> None:
    """Whoever comes back under the name beats for it, and nobody would ever do the unit."""
    coordinator = _coordinator()
    joined = coordinator.answer("join", {"name": "w"})["joined"]
    coordinator.lost("w")
    fields = {"worker": "w", "finished": [], "held": 0}
    if is_back:
        back = coordinator.answer("join", {"name": "w"})["joined"]
    assert coordinator.answer("next", {**fields, "joined": joined}) == {"end": True}
    if is_back:
        assert coordinator.answer("next", {**fields, "joined": back})["unit"] == 0


def test_reports_reach_the_driver_once_and_figures_are_kept() -> None:
    coordinator = _coordinator()
    assert _next(coordinator)["unit"] == 0
    assert _next(coordinator, done=(0,))["unit"] == 1
    _next(coordinator, done=(0, 1))
    reports, done = coordinator.take_reports(timeout_s=0)
    assert ([report.unit for report in reports], done) == ([0, 1], 2)
    assert coordinator.take_reports(timeout_s=0) == ([], 2)
    assert coordinator.workers["w"] == {"units": 2, "compute_s": 1.0, "wait_s": 0.2}


def test_a_worker_that_joins_again_gives_its_units_back() -> None:
    coordinator = _coordinator()
    coordinator.answer("join", {"name": "w"})
    assert _next(coordinator)["unit"] == 0
    coordinator.answer("join", {"name": "w"})
    assert _next(coordinator, "v")["unit"] == 0


def test_a_worker_that_holds_units_settles_where_leases_stop() -> None:
    coordinator = _coordinator(hold=2)
    assert [_next(coordinator)["unit"], _next(coordinator, held=1)["unit"]] == [0, 1]
    assert _next(coordinator, held=2) == {"settle": True}
    assert _next(coordinator, done=(0, 1)) == {"wait": True}
    coordinator.release(4)
    assert _next(coordinator)["unit"] == 2


def test_the_last_step_before_a_rest_is_saved_by_share_0() -> None:
    coordinator = _coordinator(hold=4)
    assert [_next(coordinator)["save"] for _ in range(4)] == [False, False, True, False]


def test_an_early_stop_lies_between_steps_and_beyond_what_is_leased() -> None:
    coordinator = _coordinator(end=20)
    assert [_next(coordinator)["unit"] for _ in range(3)] == [0, 1, 2]
    assert coordinator.stop_early() == 6
    assert [_next(coordinator).get("unit") for _ in range(4)] == [3, 4, 5, None]


def test_at_the_end_workers_settle_and_go() -> None:
    coordinator = _coordinator()
    coordinator.end()
    assert _next(coordinator, held=1) == {"settle": True}
    assert _next(coordinator) == {"end": True}


def test_the_first_failure_counts_and_bad_input_stays_bad_input() -> None:
    coordinator = _coordinator()
    coordinator.answer("fail", {"who": "worker 1", "error": DataError("no file", hint="look").as_dict()})
    coordinator.answer("fail", {"who": "worker 2", "error": WorkerError("x").as_dict()})
    assert isinstance(coordinator.failure, DataError)
    other = _coordinator()
    other.answer("fail", {"who": "worker 2", "error": WorkerError("ZeroDivisionError: y").as_dict()})
    assert isinstance(other.failure, WorkerError)
    assert str(other.failure) == "worker 2: ZeroDivisionError: y"


def test_servers_are_found_where_they_registered_last() -> None:
    coordinator = _coordinator()
    assert coordinator.answer("find", {"server": 0}) == {}
    with pytest.raises(LookupError):
        coordinator.server_endpoint(0)
    for port in (1, 2):
        coordinator.answer("register", {"server": 0, "host": "h", "port": port})
    assert coordinator.answer("find", {"server": 0}) == {"host": "h", "port": 2}
    coordinator.forget_server(0)
    assert coordinator.answer("find", {"server": 0}) == {}


def test_an_unknown_verb_is_refused() -> None:
    with pytest.raises(WireError):
        _coordinator().answer("dance", {})
