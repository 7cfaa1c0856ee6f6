"""Leases on a clock of the test's own: order, gate, hold, lost and silent workers, units done twice."""

from __future__ import annotations

from weft.server.units import Leases


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _leases(
    *,
    shares: int = 2,
    first: int = 0,
    end: int = 8,
    gate: int | None = None,
    clock: _Clock | None = None,
    static: bool = False,
) -> Leases:
    clock = clock or _Clock()
    return Leases(shares=shares, first=first, end=end, gate=gate, lease_s=10, clock=clock, is_static=static)


def test_units_go_out_in_order_to_whoever_asks_until_the_data_ends() -> None:
    leases = _leases(end=4)
    assert [leases.lease(name) for name in "abab"] == [0, 1, 2, 3]
    assert leases.lease("a") is None


def test_a_lost_workers_units_go_out_again_first() -> None:
    leases = _leases()
    assert [leases.lease(name) for name in "aba"] == [0, 1, 2]
    assert leases.drop("a") == [0, 2]
    assert [leases.lease("b") for _ in range(3)] == [0, 2, 3]


def test_a_silent_worker_is_lost_after_its_lease_and_a_beating_one_is_not() -> None:
    clock = _Clock()
    leases = _leases(clock=clock)
    assert [leases.lease("a"), leases.lease("b")] == [0, 1]
    clock.now = 8
    leases.beat("b")
    clock.now = 11
    assert leases.expire() == ["a"]
    assert leases.workers == ["b"]
    assert leases.lease("b") == 0


def test_a_unit_done_twice_counts_once_and_a_slow_worker_spares_the_other() -> None:
    leases = _leases()
    assert leases.lease("a") == 0
    leases.drop("a")
    assert leases.finish(0)  # "a" was only slow
    assert leases.lease("b") == 1
    assert not leases.finish(0)
    assert leases.done == 1


def test_the_watermark_waits_for_the_oldest() -> None:
    leases = _leases()
    for name in "abc":
        leases.lease(name)
    assert leases.finish(2)
    assert leases.finish(1)
    assert leases.done == 0
    assert leases.finish(0)
    assert leases.done == 3


def test_the_gate_keeps_workers_free_to_take_over_a_lost_unit() -> None:
    leases = _leases(gate=0)
    assert [leases.lease("a"), leases.lease("b")] == [0, 1]
    leases.finish(0)
    assert leases.lease("a") is None  # step 1 waits for unit 1
    leases.drop("b")
    assert leases.lease("a") == 1


def test_a_gate_of_one_lets_workers_one_step_ahead() -> None:
    leases = _leases(gate=1)
    assert [leases.lease("a") for _ in range(5)] == [0, 1, 2, 3, None]


def test_nothing_goes_out_at_or_beyond_the_hold() -> None:
    leases = _leases()
    leases.hold = 2
    assert [leases.lease("a") for _ in range(3)] == [0, 1, None]
    leases.hold = 4
    assert leases.lease("a") == 2


def test_a_resumed_run_starts_in_the_middle_of_a_step() -> None:
    leases = _leases(shares=3, first=4)
    assert [leases.lease("a") for _ in range(4)] == [4, 5, 6, 7]


def test_static_leases_give_each_rank_its_share() -> None:
    leases = _leases(shares=2, static=True)
    assert [leases.lease("b", rank=1), leases.lease("b", rank=1), leases.lease("a", rank=0)] == [1, 3, 0]


def test_a_unit_is_done_again_alone() -> None:
    leases = Leases(shares=1, first=0, end=9, gate=None, lease_s=1e9, clock=lambda: 0.0)
    assert [leases.lease("a"), leases.lease("a", held=1), leases.lease("b")] == [0, 1, 2]
    leases.drop("a")
    assert leases.lease("b", held=1) is None  # settle first
    assert [leases.lease("b"), leases.lease("b")] == [0, 1]
    assert leases.redone == {0, 1}
    assert leases.lease("b", held=1) == 3
