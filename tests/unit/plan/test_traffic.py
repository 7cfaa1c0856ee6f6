"""Bytes on the wire: ZeRO's table of collectives, Megatron's scheme, rings, experts, pipelines."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import legal_plans, one, request_of, requests, tiny_llama, tiny_mixtral, view_with

from weft.plan.request import Request
from weft.plan.traffic import Traffic, estimate_traffic
from weft.plan.view import views_of

SIX_BLOCKS = request_of(tiny_llama(), "4xH100-80GB", global_batch=16, sequence_length=128)
PARAMETERS = SIX_BLOCKS.shape.num_parameters
STREAM = 128 * 256 * 2  # one bf16 residual stream of one sequence


def traffic(request: Request, place: int = 0, **plan: Any) -> Traffic:
    return estimate_traffic(view_with(request, place, **plan))


def rows(found: Traffic, axis: str) -> dict[tuple[str, str], tuple[float, float]]:
    """(collective, phase) to (bytes, count), what is nothing left out."""
    mine = [row for row in found.rows if row.axis == axis and one(row.bytes) > 0]
    return {(row.collective, row.phase): (one(row.bytes), one(row.count)) for row in mine}


@pytest.mark.parametrize(("zero", "gathers", "reduces"), [(1, 7, 7), (2, 7, 28), (3, 56, 28)])
def test_the_table_of_collectives_defines_the_stages(zero: int, gathers: int, reduces: int) -> None:
    """7 units (6 blocks and the root), 4 micro-batches."""
    found = rows(traffic(SIX_BLOCKS, dp_shard=4, zero=zero, microbatches=4), "dp_shard")
    assert sum(count for (name, _), (_, count) in found.items() if name == "all_gather") == gathers
    assert sum(count for (name, _), (_, count) in found.items() if name == "reduce_scatter") == reduces


@pytest.mark.parametrize(("zero", "gather_times", "reduce_times"), [(1, 1, 1), (2, 1, 4), (3, 8, 4)])
def test_bytes_of_the_stages(zero: int, gather_times: int, reduce_times: int) -> None:
    """Gathers move bf16 weights, reductions float32 gradients, three quarters of each on four ranks."""
    found = rows(traffic(SIX_BLOCKS, dp_shard=4, zero=zero, microbatches=4), "dp_shard")
    gathered = sum(moved for (name, _), (moved, _) in found.items() if name == "all_gather")
    assert gathered == 3 / 4 * 2 * PARAMETERS * gather_times
    assert found["reduce_scatter", "backward"][0] == 3 / 4 * 4 * PARAMETERS * reduce_times


def test_ddp_reduces_once_whatever_the_microbatches() -> None:
    found = traffic(SIX_BLOCKS, dp_replicate=4, microbatches=4)
    assert rows(found, "dp_replicate") == {("all_reduce", "backward"): (2 * 3 / 4 * 4 * PARAMETERS, 7)}
    assert rows(found, "dp_shard") == {}


def test_hybrid_sharding_reduces_its_shard_between_replicas() -> None:
    found = traffic(SIX_BLOCKS, dp_replicate=2, dp_shard=2, zero=3)
    assert rows(found, "dp_replicate")["all_reduce", "backward"][0] == 2 * 1 / 2 * 4 * PARAMETERS / 2
    assert rows(found, "dp_shard")["reduce_scatter", "backward"][0] == 1 / 2 * 4 * PARAMETERS


def test_one_device_sends_nothing() -> None:
    found = traffic(request_of(tiny_llama(), "1xH100-80GB", global_batch=4, sequence_length=128), microbatches=4)
    assert found.rows
    assert [row for row in found.rows if one(row.bytes) or one(row.count)] == []


def test_tensor_parallelism_reduces_twice_a_block_each_way() -> None:
    """6 blocks x 2 and the embedding forward, 6 x 2 and the head backward; 2 S 3/4 bytes each."""
    found = rows(traffic(SIX_BLOCKS, tp=4, sequence_parallel=False, microbatches=16), "tp")
    times = 16 * 13
    assert found == {
        ("all_reduce", "forward"): (times * 2 * STREAM * 3 / 4, times),
        ("all_reduce", "backward"): (times * 2 * STREAM * 3 / 4, times),
    }


def test_sequence_parallelism_moves_the_same_bytes_in_two_halves() -> None:
    plain = traffic(SIX_BLOCKS, tp=4, sequence_parallel=False, microbatches=16)
    sequence = traffic(SIX_BLOCKS, tp=4, sequence_parallel=True, microbatches=16)
    assert one(plain.of("tp")[0]) == one(sequence.of("tp")[0])
    assert {name for name, _ in rows(sequence, "tp")} == {"all_gather", "reduce_scatter"}


def test_full_recomputation_repeats_the_forward_s_communication() -> None:
    none, full = (
        rows(traffic(SIX_BLOCKS, tp=4, sequence_parallel=False, microbatches=16, policy=policy), "tp")
        for policy in ("none", "full")
    )
    assert full["all_reduce", "forward"][1] == 16 * (2 * 12 + 1)
    assert full["all_reduce", "backward"] == none["all_reduce", "backward"]


def test_whole_logits_are_gathered_without_loss_parallel() -> None:
    found = rows(traffic(SIX_BLOCKS, tp=4, loss_parallel=False, microbatches=16), "tp")
    assert found["all_gather", "loss"] == (16 * 128 * 512 * 2 * 3 / 4, 16)


def test_a_parallel_block_reduces_once() -> None:
    """Falcon's attention and MLP read the same input and end in one sum."""
    falcon = request_of("falcon-7b", "1xH100-80GB", global_batch=1, sequence_length=128)
    found = rows(traffic(falcon, tp=71, sequence_parallel=False), "tp")
    assert found["all_reduce", "forward"][1] == 32 + 1


def test_a_ring_passes_keys_and_values_to_all_but_the_last() -> None:
    """64 tokens a rank, 4 key-value heads of 32, k and v, bf16; backward also their gradients."""
    request = request_of(tiny_llama(), "2xH100-80GB", global_batch=4, sequence_length=128)
    found = rows(traffic(request, cp=2, microbatches=4), "cp")
    once = 6 * 4 * 64 * (4 * 32 * 2) * 2
    assert found == {("send", "forward"): (once, 24), ("send", "backward"): (2 * once, 48)}


def test_tokens_travel_to_their_experts_and_back() -> None:
    """4 blocks, top 2, forward and backward two exchanges each; 7 of 8 parts leave the rank."""
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=8, sequence_length=64)
    found = rows(traffic(request, dp_shard=8, ep=8, zero=1), "ep")
    one_way = 4 * 64 * 2 * 128 * 2 * 7 / 8
    assert found == {("all_to_all", "forward"): (2 * one_way, 8), ("all_to_all", "backward"): (2 * one_way, 8)}
    assert rows(traffic(request, dp_shard=8, ep=1, zero=1), "ep") == {}


def test_sequence_parallel_ranks_send_their_own_tokens_to_experts() -> None:
    """Two tensor ranks with half of the tokens each; without sequence parallelism each has all of them."""
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=4, sequence_length=64)
    moved = [
        one(traffic(request, dp_shard=4, tp=2, ep=4, zero=1, sequence_parallel=sequence).of("ep")[0])
        for sequence in (True, False)
    ]
    assert moved == [4 * 4 * 32 * 2 * 128 * 2 * 3 / 4, 4 * 4 * 64 * 2 * 128 * 2 * 3 / 4]


def test_a_pipeline_s_first_rank_sends_each_microbatch_forward() -> None:
    found = rows(traffic(SIX_BLOCKS, pp=2, microbatches=16), "pp")
    assert found == {("send", "forward"): (16 * STREAM, 16)}


@pytest.mark.parametrize(
    ("schedule", "v", "forward", "backward"),
    [("1f1b", 1, 1, 0), ("interleaved_1f1b", 2, 2, 1), ("looped_bfs", 4, 4, 3), ("zbv", 2, 1, 1)],
)
def test_sends_of_the_first_rank_follow_its_stages(schedule: str, v: int, forward: int, backward: int) -> None:
    """A stage sends forward unless it is the last of all, and backward unless it is the first of all."""
    request = request_of(tiny_llama(num_hidden_layers=16), "4xH100-80GB", global_batch=8, sequence_length=128)
    found = traffic(request, pp=4, microbatches=8, schedule=schedule, virtual_stages=v)
    counts = {phase: one(found.of("pp", phase=phase)[1]) for phase in ("forward", "backward")}
    assert counts == {"forward": 8 * forward, "backward": 8 * backward}


def test_two_dimensions_pass_rows_and_columns() -> None:
    """SUMMA on 2 x 2: half of the activations' and of the weights' row, of which half leaves; backward twice."""
    found = traffic(SIX_BLOCKS, tp=4, mode="2d", sequence_parallel=False, microbatches=16)
    block = SIX_BLOCKS.shape.kinds[0]
    inputs = sum(linear.in_features for linear in block.linears) * 128 * 2
    weights = sum(linear.num_parameters for linear in block.linears) * 2
    once = 6 * (inputs + weights) / 2 * 1 / 2 * 16
    assert one(found.of("tp", phase="forward")[0]) == pytest.approx(once)
    assert one(found.of("tp", phase="backward")[0]) == pytest.approx(2 * once)


@pytest.mark.parametrize(("mode", "layers", "faces"), [("2.5d", 2, 0), ("3d", 1, 1)])
def test_eight_ranks_beyond_two_dimensions(mode: str, layers: int, faces: int) -> None:
    """2.5D: two layers of 2 x 2, each with half of the tokens and all weights. 3D: a quarter of each of three faces."""
    found = traffic(SIX_BLOCKS, tp=8, mode=mode, sequence_parallel=False, microbatches=16)
    block = SIX_BLOCKS.shape.kinds[0]
    inputs = sum(linear.in_features for linear in block.linears) * 128 * 2
    outputs = sum(linear.out_features for linear in block.linears) * 128 * 2
    weights = sum(linear.num_parameters for linear in block.linears) * 2
    passed = (inputs + weights + outputs) / 4 if faces else (inputs / layers + weights) / 2
    assert one(found.of("tp", phase="forward")[0]) == pytest.approx(16 * 6 * passed * 1 / 2)


@given(zero=st.sampled_from([1, 2, 3]), shards=st.integers(2, 16), vocab=st.integers(8, 700), m=st.integers(1, 4))
@settings(deadline=None)
def test_what_ranks_send_is_what_ranks_need(zero: int, shards: int, vocab: int, m: int) -> None:
    """All ranks of an all-gather send together what each lacks: the shards of the others, padding included."""
    request = request_of(tiny_llama(vocab_size=vocab), "1024x8xH100-80GB", global_batch=shards * m, sequence_length=8)
    view = view_with(request, dp_shard=shards, zero=zero, microbatches=m)
    found = rows(estimate_traffic(view), "dp_shard")
    lacking = (shards - 1) * one(view.share.total.shard)  # elements that one rank must receive in one gather
    gathers = sum(count for (name, _), (_, count) in found.items() if name == "all_gather") / 7
    gathered = sum(moved for (name, _), (moved, _) in found.items() if name == "all_gather")
    assert shards * gathered == pytest.approx(shards * lacking * 2 * gathers)
    reduced, reductions = found["reduce_scatter", "backward"]
    assert shards * reduced == pytest.approx(shards * lacking * 4 * reductions / 7)


@given(
    pp=st.sampled_from([2, 3, 4, 6]),
    m=st.integers(1, 8),
    kind=st.sampled_from([("1f1b", 1), ("gpipe", 1), ("looped_bfs", 2), ("looped_bfs", 4), ("zbv", 2)]),
)
@settings(deadline=None)
def test_sends_along_a_pipeline_are_as_many_as_boundaries(pp: int, m: int, kind: tuple[str, int]) -> None:
    """Over all ranks, forward and backward: m streams for each boundary between two ranks; what is sent is received."""
    schedule, v = kind
    request = request_of(tiny_llama(num_hidden_layers=48), "1024x8xH100-80GB", global_batch=m, sequence_length=128)
    plan: dict[str, Any] = {"pp": pp, "microbatches": m, "schedule": schedule, "virtual_stages": v}
    ranks = [0, *[1] * (pp - 2), 2]  # the middle stands for all between
    boundaries = v * pp - 1 - (schedule == "zbv")  # a V turns inside its last rank
    for phase in ("forward", "backward"):
        sent = [traffic(request, place, **plan).of("pp", phase=phase) for place in ranks]
        assert sum(one(moved) for moved, _ in sent) == m * boundaries * STREAM
        assert sum(one(count) for _, count in sent) == m * boundaries


@given(request=requests())
@settings(max_examples=20, deadline=None)
def test_rows_are_finite_and_non_negative_and_idle_axes_are_silent(request: Request) -> None:
    columns = legal_plans(request)
    if not len(columns):
        return
    silent = {
        "tp": columns.tp == 1,
        "cp": columns.cp == 1,
        "pp": columns.pp == 1,
        "ep": columns.ep == 1,
        "dp_shard": columns.shards == 1,
        "dp_replicate": (columns.zero > 0) & (columns.dp_replicate == 1) | (columns.dp * columns.cp == 1),
    }
    for view in views_of(request, columns):
        for row in estimate_traffic(view).rows:
            assert np.isfinite(row.bytes).all()
            assert (row.bytes >= 0).all()
            assert (row.count >= 0).all()
            assert not row.bytes[silent[row.axis][view.rows]].any(), row
            assert (row.count[row.bytes > 0] > 0).all(), row


@given(request=requests(), data=st.data())
@settings(max_examples=10, deadline=None)
def test_every_microbatch_costs_tensor_traffic_alike(request: Request, data: st.DataObject) -> None:
    """Twice the micro-batches of half the size move the same activations: bytes follow tokens."""
    columns = legal_plans(request)
    chosen = np.flatnonzero((columns.tp > 1) & (columns.pp == 1) & (columns.tp_mode == 0) & (columns.microbatches > 1))
    if not len(chosen):
        return
    row = int(chosen[data.draw(st.integers(0, len(chosen) - 1))])
    many = columns.take([row])
    merged = replace(many, microbatches=np.ones(1, dtype=np.int64))
    moved = [one(estimate_traffic(views_of(request, table)[0]).of("tp")[0]) for table in (many, merged)]
    assert moved[0] == pytest.approx(moved[1])
