"""Who is to blame, from what ranks say of themselves: silent, unlike, behind, in a circle."""

from __future__ import annotations

import os
import re

from weft.comm.flight import GroupTrace, Issued
from weft.core.errors import StallError
from weft.core.processes import start_of
from weft.train.ranks.stalls import StallScene, explain, explain_lost_store
from weft.train.ranks.status import RankStatus, own_status

ALL, DP, TP = "gloo 0", "gloo 1", "gloo 2"


def trace(
    title: str, ranks: tuple[int, ...], number: int, *, name: str = "all_reduce", shapes: str = "[[4]]"
) -> GroupTrace:
    kept = range(max(1, number - 3), number + 1)
    return GroupTrace(title=title, ranks=ranks, last=tuple(Issued(number=at, name=name, shapes=shapes) for at in kept))


def status(rank: int, groups: dict[str, GroupTrace], *, host: str = "a", phase: str = "step 9") -> RankStatus:
    return RankStatus(
        rank=rank,
        host=host,
        pid=100 + rank,
        process_start=0,
        time=50.0,
        phase=phase,
        phase_since=20.0,
        groups=groups,
        stack=(f"model.py:{rank} in forward", "loop.py:1 in run"),
        is_waiting=bool(rank),
    )


def scene(
    *answered: RankStatus, gone: tuple[RankStatus, ...] = (), world_size: int = 0, is_timeout: bool = True
) -> StallScene:
    return StallScene(
        rank=answered[0].rank,
        world_size=world_size or len(answered) + len(gone),
        answered={one.rank: one for one in answered},
        last_seen={one.rank: one for one in gone},
        timeout_s=300.0,
        is_timeout=is_timeout,
    )


def message(found: StallError | None) -> str:
    assert found is not None
    return found.message


def test_a_rank_that_does_not_answer_is_the_one() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1), 412)})
    said = message(explain(scene(own, gone=(status(1, {}, host="b"),))))
    pattern = (
        r"rank 1 \(host b, pid 101\) did not arrive in all_reduce 412 \(all ranks\) of step 9 within 300 s:"
        r" it does not answer, last seen in step 9 \d+ s ago"
    )
    assert re.fullmatch(pattern, said)


def test_ranks_of_a_host_that_is_gone_are_one_name() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1, 2, 3), 7)})
    other = status(1, {ALL: trace("all ranks", (0, 1, 2, 3), 7)})
    found = explain(scene(own, other, gone=(status(2, {}, host="b"), status(3, {}, host="b"))))
    assert message(found).startswith("ranks 2 and 3 (host b) did not arrive in all_reduce 7 (all ranks)")
    assert found is not None
    assert "is host b up" in found.hint


def test_a_rank_that_was_never_seen_did_not_join() -> None:
    assert message(explain(scene(status(0, {}), world_size=2))) == "rank 1 never joined within 300 s"


def test_a_lost_connection_names_the_rank_that_left() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1), 3)})
    found = explain(scene(own, gone=(status(1, {}, host="b"),), is_timeout=False))
    assert message(found).startswith("rank 1 (host b, pid 101) left: it does not answer")
    assert explain(scene(own, status(1, own.groups), is_timeout=False)) is None


def test_the_rank_at_the_end_of_the_chain_is_to_blame() -> None:
    """Rank 0 waits for rank 1 in tp, which waits for rank 3 in dp."""
    ranks = [
        status(0, {DP: trace("data parallel", (0, 2), 5), TP: trace("tp", (0, 1), 9)}),
        status(1, {TP: trace("tp", (0, 1), 8), DP: trace("data parallel", (1, 3), 6)}),
        status(2, {DP: trace("data parallel", (0, 2), 5), TP: trace("tp", (2, 3), 9)}),
        status(3, {DP: trace("data parallel", (1, 3), 5), TP: trace("tp", (2, 3), 8)}, phase="step 8"),
    ]
    said = message(explain(scene(*ranks)))
    assert said == (
        "rank 3 (host a, pid 103) did not arrive in all_reduce 6 (data parallel) of step 9 within 300 s:"
        " in step 8 for 30 s, at model.py:3 in forward"
    )


def test_another_collective_at_the_same_place_is_named_on_both_sides() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1, 2), 12)})
    same = status(2, {ALL: trace("all ranks", (0, 1, 2), 12)})
    odd = status(1, {ALL: trace("all ranks", (0, 1, 2), 12, name="all_gather")})
    said = message(explain(scene(own, odd, same)))
    assert "is all_gather on rank 1 and all_reduce of [[4]] on ranks 0 and 2" in said


def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    first = status(0, {DP: trace("checkpoint", (0, 1), 2), ALL: trace("all ranks", (0, 1), 8)})
    second = status(1, {ALL: trace("all ranks", (0, 1), 7), DP: trace("checkpoint", (0, 1), 3)})
    said = message(explain(scene(first, second)))
    assert said.startswith("ranks 0 and 1 wait for each other: rank 0 is in all_reduce 8 (all ranks)")


def test_a_group_that_has_left_one_record_only_blames_nobody() -> None:
    first = status(0, {DP: trace("data parallel", (0, 1), 500), ALL: trace("all ranks", (0, 1), 8)})
    second = status(1, {ALL: trace("all ranks", (0, 1), 8)})
    found = explain(scene(second, first))
    assert found is None or "500" not in found.message


def test_a_store_that_does_not_answer_is_rank_0s_host() -> None:
    own = status(2, {}, host="b")
    found = explain_lost_store(address="10.0.0.1:29500", silent_s=301, rank_0=status(0, {}), own=own)
    assert found.message == (
        "rank 0 (host a, pid 100), on the host of the store 10.0.0.1:29500, has not answered for 301 s;"
        " rank 2 (host b) ended in step 9"
    )


def test_a_status_survives_the_store() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1), 412)})
    assert RankStatus.from_json(own.to_json()) == own
    now = own_status(3, in_full=True)
    assert (now.rank, now.pid, now.process_start) == (3, os.getpid(), start_of(os.getpid()))
    assert any("test_a_status_survives_the_store" in call or "status.py" in call for call in now.stack)
