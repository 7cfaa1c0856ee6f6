"""The cause among several ends: belief before time, and never a peer that only lost its connection."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import BatchError, InputError, RankError, SaveError, WeftError
from weft.launch.cause import RankEnd, describe, find_cause, is_certain
from weft.train.ranks.failures import FailureRecord


def record(rank: int, error: WeftError, *, time: float = 10.0, secondary: bool = False) -> FailureRecord:
    return FailureRecord(
        rank=rank,
        world_size=4,
        phase="step 3",
        time=time,
        secondary=secondary,
        traceback="",
        error_fields=error.as_dict(),
    )


def end(
    rank: int, *, exit_code: int | None = 3, written: FailureRecord | None = None, by_launcher: bool = False
) -> RankEnd:
    return RankEnd(rank=rank, pid=100 + rank, exit_code=exit_code, killed_by_launcher=by_launcher, record=written)


def lost_peers(rank: int, *, time: float = 0.0) -> RankEnd:
    return end(rank, written=record(rank, RankError("connection reset"), time=time, secondary=True))


BAD_INPUT = end(1, exit_code=2, written=record(1, InputError("bad"), time=99.0))
KILLED = end(2, exit_code=-signal.SIGKILL)
RAISED = end(3, written=record(3, RankError("ValueError: x"), time=50.0))
ABORTED = end(4, exit_code=-signal.SIGABRT)
SILENT = end(5, exit_code=7)


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [(BAD_INPUT, KILLED), (KILLED, RAISED), (RAISED, ABORTED), (RAISED, SILENT), (ABORTED, lost_peers(0))],
)
def test_the_order_of_belief(stronger: RankEnd, weaker: RankEnd) -> None:
    assert find_cause([weaker, stronger]) is stronger


def test_among_equals_the_earlier_one() -> None:
    late = end(0, written=record(0, SaveError("disk"), time=60.0))
    assert find_cause([late, RAISED]) is RAISED


@settings(max_examples=50)
@given(cause=st.sampled_from([BAD_INPUT, KILLED, RAISED, ABORTED, SILENT]), data=st.data())
def test_peers_that_lost_connection_or_were_killed_by_us_never_hide_the_cause(
    cause: RankEnd, data: st.DataObject
) -> None:
    peer = st.builds(lost_peers, st.integers(10, 20), time=st.floats(0, 100))
    ours = st.builds(end, st.integers(21, 30), exit_code=st.just(-9), by_launcher=st.just(True))
    good = st.builds(end, st.integers(31, 40), exit_code=st.just(0))
    others = data.draw(st.lists(peer | ours | good, max_size=6))
    assert find_cause(data.draw(st.permutations([*others, cause]))) is cause


def test_nobody_failed() -> None:
    assert find_cause([end(0, exit_code=0), end(1, exit_code=None)]) is None
    assert not is_certain(None)


def test_a_rank_that_wrote_its_error_has_failed_though_it_still_runs() -> None:
    lingering = end(0, exit_code=None, written=record(0, RankError("x")))
    assert find_cause([lingering, end(1, exit_code=None)]) is lingering


def test_waiting_longer_could_not_change_a_certain_cause() -> None:
    certain = [is_certain(cause) for cause in (BAD_INPUT, KILLED, RAISED, ABORTED, SILENT, lost_peers(0))]
    assert certain == [True, True, True, False, False, False]


def test_the_error_keeps_its_class_and_names_rank_and_phase() -> None:
    error = describe(end(1, written=record(1, BatchError("7 does not divide", hint="take 8"))), num_ranks=2)
    assert type(error) is BatchError
    assert (error.message, error.hint) == ("rank 1 failed in step 3: 7 does not divide", "take 8")


def test_a_signal_is_named_even_when_python_has_no_name_for_it() -> None:
    assert describe(KILLED, num_ranks=2).message == "rank 2 (pid 102) was killed by SIGKILL"
    assert describe(end(0, exit_code=-40), num_ranks=2).message == "rank 0 (pid 100) was killed by signal 40"
    assert describe(KILLED, num_ranks=1).message == "the process (pid 102) was killed by SIGKILL"
