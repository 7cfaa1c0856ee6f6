"""Who is to blame, from what ranks say of themselves: silent, unlike, behind, in a circle."""

from __future__ import annotations

import dataclasses
import os
import re

from weft.comm.flight import GroupTrace, Issued
from weft.core.errors import StallError
from weft.core.processes import start_of
from weft.train.ranks.stalls import StallScene, explain, explain_lost_store, is_patient
from weft.train.ranks.status import Observation, RankStatus, own_status

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


def with_usual(trace_of: GroupTrace, number: int, *, is_usual: bool, shapes: str) -> GroupTrace:
    """The trace with another shape at this number."""
    last = tuple(
        dataclasses.replace(one, shapes=shapes, is_usual=is_usual) if one.number == number else one
        for one in trace_of.last
    )
    return dataclasses.replace(trace_of, last=last)


def test_of_two_ranks_the_one_that_left_its_order_issues_another_collective() -> None:
    both = trace("all ranks", (0, 1), 12)
    own = status(0, {ALL: with_usual(both, 12, is_usual=True, shapes="[[4]]")})
    odd = status(1, {ALL: with_usual(both, 12, is_usual=False, shapes="[[9]]")})
    said = "number 12 (all ranks) is all_reduce of [[9]] on rank 1 and all_reduce of [[4]] on rank 0, in step 9"
    for first, second in ((own, odd), (odd, own)):
        found = message(explain(scene(first, second)))
        assert (
            found
            == f"rank 1 (host a, pid 101) issues another collective than the others: {said}, at model.py:1 in forward"
        )
    undecided = status(1, {ALL: with_usual(both, 12, is_usual=True, shapes="[[9]]")})
    assert message(explain(scene(own, undecided))).startswith("the ranks do not issue the same collectives: number 12")


def test_of_ranks_that_wait_for_each_other_the_one_that_left_its_order_is_named() -> None:
    skipped = trace("all ranks", (0, 1), 8)
    skipped = dataclasses.replace(
        skipped, last=(*skipped.last[:-1], dataclasses.replace(skipped.last[-1], is_usual=False))
    )
    first = status(0, {ALL: trace("all ranks", (0, 1), 7), DP: trace("data parallel", (0, 1), 3)})
    second = status(1, {DP: trace("data parallel", (0, 1), 2), ALL: skipped})
    said = message(explain(scene(first, second)))
    assert said.startswith(
        "rank 1 (host a, pid 101) left its order of collectives, and ranks 0 and 1 wait for each other"
    )


def waiting_for(status_of: RankStatus, peer: int, what: str = "activations of micro-batch 1 for stage 1") -> RankStatus:
    return dataclasses.replace(status_of, message=what, message_peer=peer, is_waiting=True)


def test_the_end_of_a_chain_of_messages_between_stages_is_to_blame() -> None:
    ranks = [waiting_for(status(0, {}), 1, "gradients of micro-batch 0 for stage 0"), waiting_for(status(1, {}), 2)]
    said = message(explain(scene(*ranks, status(2, {}))))
    assert said.startswith(
        "rank 2 (host a, pid 102) did not arrive in the exchange of activations of micro-batch 1 for stage 1 (pipeline)"
    )


def test_a_rank_that_is_silent_for_seconds_only_is_not_blamed_for_one_that_is_behind() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1, 2), 7)})
    late = status(1, {ALL: trace("all ranks", (0, 1, 2), 6)})
    for silent_s, blamed in ((3.0, 1), (200.0, 2)):
        gone = dataclasses.replace(status(2, {}), time=50.0 - silent_s)
        assert message(explain(scene(own, late, gone=(gone,)))).startswith(f"rank {blamed} (host a")


def test_what_its_host_sees_of_a_silent_rank_is_told() -> None:
    own = status(0, {ALL: trace("all ranks", (0, 1), 412)})
    gone = dataclasses.replace(status(1, {}, host="b"), time=-300.0)
    seen = Observation(rank=1, state="it is running (state R)", stack=("regex.py:3 in match", "loop.py:1 in run"))
    assert Observation.from_json(seen.to_json()) == seen
    found = explain(dataclasses.replace(scene(own, gone=(gone,)), observed={1: seen}))
    assert re.search(
        r"within 300 s: it is running \(state R\), last seen .* ago, at regex.py:3 in match$", message(found)
    )
    assert found is not None
    assert "regex.py:3 in match < loop.py:1 in run" in found.hint


def test_an_abort_compares_the_shapes_of_gathers_too() -> None:
    ranks = [
        status(rank, {ALL: trace("all ranks", (0, 1), 9, name="all_gather", shapes=f"[[{4 + rank}]]")})
        for rank in (0, 1)
    ]
    assert explain(scene(*ranks)) is None
    assert "all_gather of [[5]] on rank 1" in message(explain(dataclasses.replace(scene(*ranks), is_abort=True)))


def test_slow_phases_are_no_hang() -> None:
    own, saving = status(0, {}), dataclasses.replace(status(1, {}), is_slow_phase=True)
    assert is_patient(scene(own, saving))
    assert not is_patient(scene(own, gone=(saving,)))
    assert not is_patient(scene(own, status(1, {})))
