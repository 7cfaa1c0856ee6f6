"""The rank that the others wait for, from how often each rank's main thread waits."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from weft.comm.messages import waiting_for
from weft.train.ranks import pace as rank_pace
from weft.train.ranks.failures import phase
from weft.train.ranks.pace import PaceLooks, Paces, RankPace, slow_rank


def pace(rank: int, *, waits: int, looks: int = 100) -> RankPace:
    return RankPace(rank=rank, host="a", looks=looks, waits=waits)


def test_the_rank_that_works_longest_is_named_with_its_seconds() -> None:
    found = slow_rank([pace(0, waits=90), pace(1, waits=88), pace(2, waits=0)], step_s=2.0)
    assert found is not None
    assert (found.rank, found.work_s, found.others_s) == (2, 2.0, pytest.approx(0.22))
    assert str(found) == "rank 2 (host a) makes the others wait: it works 2 s of a step, they 0.22 s (median)"


@pytest.mark.parametrize(
    "paces",
    [
        [pace(0, waits=20), pace(1, waits=35)],  # about equal
        [pace(0, waits=9, looks=10), pace(1, waits=0, looks=10)],  # too few looks
        [pace(0, waits=24, looks=40), pace(1, waits=16, looks=40)],  # 1.5 times the work, as 40 looks find by chance
        [pace(0, waits=0)],
    ],
)
def test_nobody_is_named_without_need(paces: list[RankPace]) -> None:
    assert slow_rank(paces, step_s=1.0) is None


def test_the_same_difference_is_named_once_looks_are_many() -> None:
    found = slow_rank([pace(0, waits=240, looks=400), pace(1, waits=150, looks=400)], step_s=1.0)
    assert found is not None
    assert found.rank == 1


def test_paces_are_those_since_they_were_taken() -> None:
    paces = Paces()
    paces.put([pace(0, waits=90), pace(1, waits=0)])
    assert slow_rank(paces.take(), step_s=1.0) is not None
    paces.put([pace(0, waits=95, looks=200), pace(1, waits=5, looks=200)])  # equal from now on
    assert slow_rank(paces.take(), step_s=1.0) is None
    assert paces.take() == []
    assert {one.looks for one in paces.whole_run()} == {200}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_look_counts_a_wait_for_a_message_and_no_sleep_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = PaceLooks()
    with phase("step 2"):
        looks.count()
        with waiting_for("activations of micro-batch 0 for stage 1", 0):
            looks.count()
        asleep = threading.Thread(target=lambda: [time.sleep(0.2), looks.count()])  # while the main thread is in join
        asleep.start()
        asleep.join()
        assert (looks.looks, looks.waits) == (3, 1)
        monkeypatch.setattr(rank_pace, "is_pending", lambda: True)
        pending = threading.Thread(target=lambda: [time.sleep(0.2), looks.count()])
        pending.start()
        pending.join()
        looks.count()  # awake: this thread works beside a collective in flight
    assert (looks.looks, looks.waits) == (5, 2)
    with phase("saving a checkpoint", is_slow=True):
        looks.count()
    assert looks.looks == 5
