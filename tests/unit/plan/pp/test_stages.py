"""What the first, the middle and the last rank of a pipeline hold, against the schedules themselves."""

import pytest
from plan_cases import columns_with, one, request_of, tiny_llama

from weft import zoo
from weft.plan.pp.stages import PLACES, Place, Stage, bubble_of, chunks_of, stage_of
from weft.schedule import count_in_flight, generate

LLAMA_405B = zoo.named("llama-3.1-405b")


def stage(place: Place, **keys: object) -> Stage:
    return stage_of(LLAMA_405B, columns_with(keys), place=place)


def test_without_a_pipeline_a_rank_holds_everything() -> None:
    for place in PLACES:
        found = stage(place, microbatches=8)
        assert found.blocks.tolist() == [[126]]
        assert found.holds_embedding.all()
        assert found.holds_head.all()
        assert one(found.in_flight) == 1


def test_405b_on_16_stages_spares_the_first_and_the_last_a_block() -> None:
    """126 = 7 + 14 x 8 + 7, as Llama 3's report has it."""
    blocks = [one(stage(place, pp=16, microbatches=16).blocks[:, 0]) for place in PLACES]
    assert blocks == [7, 8, 7]
    assert blocks[0] + 14 * blocks[1] + blocks[2] == 126


def test_the_ends_hold_embedding_and_head() -> None:
    found = [stage(place, pp=16, microbatches=16) for place in PLACES]
    assert [bool(s.holds_embedding[0]) for s in found] == [True, False, False]
    assert [bool(s.holds_head[0]) for s in found] == [False, False, True]


def test_a_v_has_both_ends_on_its_first_rank() -> None:
    first = stage("first", pp=8, schedule="zbv", virtual_stages=2, microbatches=16)
    last = stage("last", pp=8, schedule="zbv", virtual_stages=2, microbatches=16)
    assert first.holds_embedding[0]
    assert first.holds_head[0]
    assert not last.holds_embedding[0]
    assert not last.holds_head[0]


def test_chunks_of_a_loop_and_of_a_v() -> None:
    assert chunks_of("interleaved_1f1b", rank=1, num_ranks=4, virtual_stages=3) == (1, 5, 9)
    assert chunks_of("dualpipev", rank=1, num_ranks=4, virtual_stages=2) == (1, 6)
    assert chunks_of("1f1b", rank=3, num_ranks=4, virtual_stages=1) == (3,)


def test_the_first_stage_of_1f1b_keeps_p_and_of_gpipe_all() -> None:
    assert one(stage("first", pp=4, microbatches=16).in_flight) == 4
    assert one(stage("last", pp=4, microbatches=16).in_flight) == 1
    assert one(stage("first", pp=4, microbatches=2).in_flight) == 2
    assert one(stage("first", pp=4, microbatches=16, schedule="gpipe").in_flight) == 16


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"),
    [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2), ("zero_bubble", 1), ("zbv", 2)],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_in_flight_is_what_the_schedule_itself_keeps(schedule: str, virtual_stages: int, place: Place) -> None:
    """Counted from the list of actions, in units of all the rank's blocks, which are equal here."""
    actions = generate(schedule, num_ranks=4, num_microbatches=8, virtual_stages=virtual_stages)
    rank, counted = (0 if place == "first" else 3), count_in_flight(actions)
    keys = {"pp": 4, "microbatches": 8, "schedule": schedule, "virtual_stages": virtual_stages}
    shape = tiny_llama(num_hidden_layers=32)
    found = stage_of(shape, columns_with({**keys, "blocks": [8 // virtual_stages] * 4 * virtual_stages}), place=place)
    assert one(found.in_flight) == pytest.approx(counted.by_rank_until_input[rank] / virtual_stages)
    assert one(found.in_flight + found.waiting) == pytest.approx(counted.by_rank_until_weight[rank] / virtual_stages)
    holds_last = actions.stage_to_rank[-1] == rank
    assert one(found.head_in_flight) == (counted.by_stage_until_input[-1] if holds_last else 0)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "zbv", "dualpipev"])
@pytest.mark.parametrize("blocks", [[5, 3, 4, 1, 2, 6, 2, 1], [1, 1, 2, 3, 3, 4, 5, 5], [3, 3, 3, 3, 4, 4, 3, 1]])
@pytest.mark.parametrize("place", ["first", "last"])
def test_unequal_stages_of_a_rank_count_by_their_blocks(schedule: str, blocks: list[int], place: Place) -> None:
    """Never less than the schedule keeps, block by block, and little more."""
    keys = {"pp": 4, "microbatches": 8, "schedule": schedule, "virtual_stages": 2, "blocks": blocks}
    found = stage_of(tiny_llama(num_hidden_layers=24), columns_with(keys), place=place)
    made = generate(schedule, num_ranks=4, num_microbatches=8, virtual_stages=2)
    now, most = 0, 0
    for action in made.ranks[0 if place == "first" else 3]:
        now += blocks[action.stage] * {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind.value]
        most = max(most, now)
    assert most <= one(found.in_flight * found.blocks.sum()) <= 1.25 * most


def test_weight_versions_of_asynchronous_pipelines() -> None:
    assert one(stage("first", pp=4, microbatches=8, schedule="pipedream").versions) == 4
    assert one(stage("last", pp=4, microbatches=8, schedule="pipedream").versions) == 1
    assert one(stage("first", pp=4, microbatches=8, schedule="pipedream_2bw").versions) == 2
    assert one(stage("first", pp=4, microbatches=8).versions) == 1


def test_bubbles() -> None:
    """1F1B waits (p - 1) / (m + p - 1); interleaving divides the wait by v; nothing waits without a pipeline."""
    columns = columns_with(
        {"pp": 4, "microbatches": 8},
        {"pp": 4, "microbatches": 8, "schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"pp": 1, "microbatches": 8},
    )
    assert bubble_of(columns).tolist() == pytest.approx([3 / 11, 3 / 19, 0])


def test_the_middle_is_the_stage_that_holds_the_most() -> None:
    """DeepSeek-V3's first three blocks are dense and small, and fill the first two of 32 stages: neither is it."""
    shape = zoo.named("deepseek-v3")
    columns = columns_with({"pp": 32, "microbatches": 32})
    kinds = [kind.moe is not None for kind in shape.kinds]
    blocks = {place: stage_of(shape, columns, place=place).blocks[0] for place in PLACES}
    dense = {
        place: sum(count for count, has in zip(row, kinds, strict=True) if not has) for place, row in blocks.items()
    }
    assert dense["first"] == blocks["first"].sum() == 1
    assert dense["middle"] == 0
    assert blocks["middle"].sum() == 2


def test_every_block_is_on_some_rank() -> None:
    request = request_of(tiny_llama(num_hidden_layers=7))
    columns = columns_with({"pp": 2, "microbatches": 4})
    blocks = sum(one(stage_of(request.shape, columns, place=place).blocks[:, 0]) for place in ("first", "last"))
    assert blocks == 7
