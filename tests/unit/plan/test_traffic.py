"""Bytes on the wire: ZeRO's table of collectives, Megatron's scheme, rings, experts, pipelines."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import legal_plans, one, request_of, requests, tiny_llama, tiny_mixtral, view_with

from weft.core.model_shape import ModelShape
from weft.models.shape.lookup import shape_from_type
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
    assert rows(found, "dp_replicate") == {("all_reduce", "backward"): (2 * 3 / 4 * 4 * PARAMETERS, 2)}  # 20 MB
    assert rows(found, "dp_shard") == {}


def buckets(request: Request, **plan: Any) -> tuple[float, float]:
    """(least, most) all-reduces between replicas."""
    (row,) = (row for row in traffic(request, **plan).rows if row.axis == "dp_replicate")
    return one(row.least), one(row.count)


def test_gradients_of_replicas_share_buckets() -> None:
    """The first of DDP has 1 MiB, the next 25 MiB; a pipeline's have 25 MiB. A bucket ends between two tensors."""
    assert buckets(SIX_BLOCKS, dp_replicate=4) == (1, 2)
    assert buckets(SIX_BLOCKS, dp_replicate=4, find_unused_parameters=True) == (2, 3)  # and which parameters were used
    assert buckets(SIX_BLOCKS, dp_replicate=4, bucket_bytes=2**20) == (1, 20)  # 19 MiB, the first of them alone
    assert buckets(SIX_BLOCKS, dp_replicate=2, pp=2, microbatches=4, find_unused_parameters=True) == (1, 1)
    llama = request_of("llama-3-8b", "8xH200", global_batch=8, sequence_length=128)
    assert buckets(llama, dp_replicate=8) == (1, 32 * 7 + 3)  # not 1,225: most matrices are larger than a bucket
    assert buckets(SIX_BLOCKS, dp_replicate=2, dp_shard=2, zero=3) == (7, 7)  # a unit each


@pytest.mark.parametrize(("zero", "reduces"), [(1, 3), (2, 8 * 4), (3, 8 * 4)])
def test_both_ends_of_a_v_reduce_the_root(zero: int, reduces: int) -> None:
    """Two blocks and the root; the first and the last stage are on one rank, each with gradients of the root."""
    found = traffic(SIX_BLOCKS, pp=2, dp_shard=2, zero=zero, microbatches=8, schedule="zbv", virtual_stages=2)
    assert rows(found, "dp_shard")["reduce_scatter", "backward"][1] == reduces


def test_hybrid_sharding_reduces_its_shard_between_replicas() -> None:
    found = traffic(SIX_BLOCKS, dp_replicate=2, dp_shard=2, zero=3)
    assert rows(found, "dp_replicate")["all_reduce", "backward"][0] == 2 * 1 / 2 * 4 * PARAMETERS / 2
    assert rows(found, "dp_shard")["reduce_scatter", "backward"][0] == 1 / 2 * 4 * PARAMETERS


def test_a_secondary_shard_gathers_among_its_ranks_in_the_backward() -> None:
    plain, near = (
        rows(traffic(SIX_BLOCKS, dp_shard=4, zero=3, microbatches=2, secondary_shard=size), "dp_shard")
        for size in (0, 2)
    )
    assert plain["all_gather", "backward"] == (2 * 3 / 4 * 2 * PARAMETERS, 14)
    assert near == {**plain, ("all_gather", "backward"): (2 * 1 / 2 * 2 * PARAMETERS, 14)}


def test_one_device_sends_nothing() -> None:
    found = traffic(request_of(tiny_llama(), "1xH100-80GB", global_batch=4, sequence_length=128), microbatches=4)
    assert found.rows
    assert [row for row in found.rows if one(row.bytes) or one(row.count)] == []


def all_reduces(nbytes: float, count: int) -> tuple[float, float]:
    """On four ranks a rank sends 2 x 3/4 of what is reduced."""
    return nbytes * 2 * 3 / 4, count


LOSS = 3 * 128 * 4  # of a micro-batch: a maximum a token, then a sum and a logit, in float32


def test_tensor_parallelism_reduces_twice_a_block_each_way() -> None:
    """6 blocks x 2 and the embedding forward, 6 x 2 and the head backward; the loss reduces a maximum and two sums."""
    found = rows(traffic(SIX_BLOCKS, tp=4, sequence_parallel=False, microbatches=16), "tp")
    assert found == {
        ("all_reduce", "forward"): all_reduces(16 * (13 * STREAM + LOSS), 16 * 15),
        ("all_reduce", "backward"): all_reduces(16 * 13 * STREAM, 16 * 13),
    }


def test_sequence_parallelism_gathers_and_scatters_in_place_of_each_reduction() -> None:
    """12 of each each way; the last block's output is gathered, the first one's input gradient too; ends reduce."""
    found = rows(traffic(SIX_BLOCKS, tp=4, sequence_parallel=True, microbatches=16), "tp")
    half = STREAM * 3 / 4
    norms = 2 * 6 * (256 + 1) * 4  # every rank has the gradients of its own tokens; a mark goes along with each
    assert found == {
        ("all_gather", "forward"): (16 * 13 * half, 16 * 13),
        ("reduce_scatter", "forward"): (16 * 12 * half, 16 * 12),
        ("all_gather", "backward"): (16 * 13 * half, 16 * 13),
        ("reduce_scatter", "backward"): (16 * 12 * half, 16 * 12),
        ("all_reduce", "forward"): all_reduces(16 * (STREAM + LOSS), 16 * 3),
        ("all_reduce", "backward"): all_reduces(16 * STREAM, 16),
        ("all_reduce", "update"): all_reduces(norms, 1),
    }


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_repeats_the_forward_s_communication_in_the_backward(policy: str) -> None:
    """All but the last sum of a block, behind which nothing is kept."""
    plan = {"tp": 4, "sequence_parallel": False, "microbatches": 16}
    none, again = (rows(traffic(SIX_BLOCKS, **plan, policy=name), "tp") for name in ("none", policy))
    assert again["all_reduce", "forward"] == none["all_reduce", "forward"]
    assert again["all_reduce", "backward"][1] == 16 * (13 + 6)


@pytest.mark.parametrize("key", ["saves_after_exit", "dropout"])
def test_recomputation_comes_to_the_last_sum_where_something_after_it_is_kept(key: str) -> None:
    shape = SIX_BLOCKS.shape
    changes: dict[str, Any] = {key: 1}
    request = replace(SIX_BLOCKS, shape=replace(shape, kinds=(replace(shape.kinds[0], **changes),)))
    found = rows(traffic(request, tp=4, sequence_parallel=False, microbatches=16, policy="full"), "tp")
    assert found["all_reduce", "backward"][1] == 16 * (13 + 12)


def test_whole_logits_are_gathered_without_loss_parallel() -> None:
    """In the compute dtype, padded to a multiple of tp: 510 tokens on 4 ranks travel as 512."""
    request = request_of(tiny_llama(vocab_size=510), "4xH100-80GB", global_batch=16, sequence_length=128)
    found = rows(traffic(request, tp=4, loss_parallel=False, sequence_parallel=False, microbatches=16), "tp")
    assert found["all_gather", "forward"] == (16 * 128 * 512 * 2 * 3 / 4, 16)
    assert found["all_reduce", "forward"] == all_reduces(16 * 13 * STREAM, 16 * 13)


def test_repeated_key_value_heads_are_summed_over_their_neighbours() -> None:
    """4 heads of 32 on 8 ranks: pairs hold the same one, of k and of v, in 6 blocks; over two ranks, in float32."""
    found = rows(traffic(SIX_BLOCKS, tp=8, sequence_parallel=False), "tp")
    assert found["all_reduce", "update"] == (6 * 2 * (32 * 256 + 1) * 4 * 2 * 1 / 2, 1)
    sharded = rows(traffic(SIX_BLOCKS, tp=8, dp_shard=2, zero=1, sequence_parallel=False), "tp")
    assert sharded["all_reduce", "update"] == (6 * 2 * (16 * 256 + 1) * 4 * 2 * 1 / 2, 1)


def test_gradients_of_whole_parameters_inside_a_region_are_always_summed() -> None:
    """Qwen 3 normalises each head of queries and keys with the same weights."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    qwen = shape_from_type("qwen3", {**sizes, "intermediate_size": 768, "head_dim": 32, "vocab_size": 512})
    request = request_of(qwen, "4xH100-80GB", global_batch=16, sequence_length=128)
    found = rows(traffic(request, tp=4, sequence_parallel=False), "tp")
    assert found["all_reduce", "update"] == all_reduces(6 * 2 * (32 + 1) * 4, 1)


def test_large_gradients_travel_alone() -> None:
    """DeepSeek-V3's latent projections of queries, 1536 x 7168, are whole on every rank, in 61 blocks."""
    request = request_of("deepseek-v3", "8xH100-80GB", global_batch=8, sequence_length=128)
    assert rows(traffic(request, tp=8, sequence_parallel=False), "tp")["all_reduce", "update"][1] == 61 + 1


def test_norms_over_all_heads_reduce_their_statistics() -> None:
    """OLMo 2 normalises queries and keys over all heads: a float32 a token and norm, forward and backward."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8}
    olmo = shape_from_type("olmo2", {**sizes, "intermediate_size": 768, "vocab_size": 512})
    request = request_of(olmo, "4xH100-80GB", global_batch=16, sequence_length=128)
    found = rows(traffic(request, tp=4, sequence_parallel=False, microbatches=16), "tp")
    assert found["all_reduce", "forward"] == all_reduces(16 * (13 * STREAM + LOSS + 12 * 128 * 4), 16 * 27)
    assert found["all_reduce", "backward"] == all_reduces(16 * (13 * STREAM + 12 * 128 * 4), 16 * 25)


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_take_their_choices_and_weights_along(sequence: bool) -> None:
    """Mixtral: int64 choices and float32 weights of 2 experts a token, gathered with the tokens; weights come back."""
    request = request_of(tiny_mixtral(), "4xH100-80GB", global_batch=8, sequence_length=64)
    found = rows(traffic(request, tp=4, sequence_parallel=sequence, microbatches=8), "tp")
    stream, weights = 64 * 128 * 2, 64 * 2 * 4
    if sequence:
        assert found["all_gather", "forward"] == (8 * (9 * stream + 4 * 3 * weights) * 3 / 4, 8 * (9 + 8))
        assert found["reduce_scatter", "backward"] == (8 * (8 * stream + 4 * weights) * 3 / 4, 8 * (8 + 4))
    else:
        assert found["all_reduce", "backward"] == all_reduces(8 * (9 * stream + 4 * weights), 8 * (9 + 4))


def test_a_parallel_block_has_two_regions_all_the_same() -> None:
    """Falcon's attention and MLP read the same input; each has its own entry and its own sum."""
    falcon = request_of("falcon-7b", "1xH100-80GB", global_batch=1, sequence_length=128)
    found = rows(traffic(falcon, tp=71, sequence_parallel=False), "tp")
    assert found["all_reduce", "backward"][1] == 2 * 32 + 1


def test_attention_left_whole_is_repeated_by_every_rank_on_the_whole_sequence() -> None:
    shape = SIX_BLOCKS.shape
    linears = tuple(
        replace(linear, style="replicated") if linear.role == "attention" else linear
        for linear in shape.kinds[0].linears
    )
    request = replace(SIX_BLOCKS, shape=replace(shape, kinds=(replace(shape.kinds[0], linears=linears),)))
    found = rows(traffic(request, tp=4, sequence_parallel=True), "tp")
    assert found["all_gather", "forward"][1] == 13  # six MLPs, six gathers for attention, the end
    assert found["reduce_scatter", "forward"][1] == 6
    assert rows(traffic(request, tp=4, sequence_parallel=False), "tp")["all_reduce", "backward"][1] == 7


def test_keys_and_values_are_gathered_twice_and_their_gradients_reduced() -> None:
    """64 tokens a rank, 4 key-value heads of 32, k and v, bf16."""
    request = request_of(tiny_llama(), "2xH100-80GB", global_batch=4, sequence_length=128)
    found = rows(traffic(request, cp=2, microbatches=4), "cp")
    once = 6 * 4 * 64 * (4 * 32 * 2) * 2
    assert found == {
        ("all_gather", "forward"): (once, 48),
        ("all_gather", "backward"): (once, 48),
        ("reduce_scatter", "backward"): (once, 48),
    }


@pytest.mark.parametrize("attention", ["gather", "ring", "ulysses"])
def test_every_call_of_attention_in_a_block_has_its_exchanges(attention: str) -> None:
    once, twice = (request_of(shape, "2xH100-80GB", global_batch=4, sequence_length=128) for shape in called(1, 2))
    plan = {"cp": 2, "microbatches": 4, "attention": attention, "policy": "full"}
    expected = {key: (2 * moved, 2 * count) for key, (moved, count) in rows(traffic(once, **plan), "cp").items()}
    assert rows(traffic(twice, **plan), "cp") == expected


def called(*numbers: int) -> list[ModelShape]:
    """Models whose blocks call attention that many times."""
    shape = tiny_llama()
    (block,) = shape.kinds
    assert block.attention is not None
    attentions = [replace(block.attention, calls=number) for number in numbers]
    return [replace(shape, kinds=(replace(block, attention=each),)) for each in attentions]


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("full", 2)])
def test_ulysses_exchanges_queries_keys_values_and_outputs(recompute: str, times: int) -> None:
    """64 tokens a rank, 8 heads of queries and outputs, 4 of keys and values; half of them stay."""
    request = request_of(tiny_llama(), "2xH100-80GB", global_batch=4, sequence_length=128)
    found = rows(traffic(request, cp=2, microbatches=4, attention="ulysses", policy=recompute), "cp")
    once = 6 * 4 * 64 * (2 * (8 + 4) * 32) * 2 / 2
    assert found == {("all_to_all", "forward"): (once, 96), ("all_to_all", "backward"): (times * once, times * 96)}


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("full", 3)])
def test_a_ring_sends_keys_and_values_on_and_their_gradients(recompute: str, times: int) -> None:
    """One hop of k and v of 64 tokens a rank in a message; the backward passes them again, with gradients."""
    request = request_of(tiny_llama(), "2xH100-80GB", global_batch=4, sequence_length=128)
    found = rows(traffic(request, cp=2, microbatches=4, attention="ring", policy=recompute), "cp")
    once = 6 * 4 * 64 * (4 * 32 * 2) * 2
    assert found == {("send", "forward"): (once, 24), ("send", "backward"): (times * once, times * 24)}


@pytest.mark.parametrize(("kv_heads", "travelling"), [(4, 4), (1, 2)])
def test_pairs_exchange_heads_and_send_their_keys_to_another_pair(kv_heads: int, travelling: int) -> None:
    """32 tokens a rank: half of its heads go to its neighbour, keys and values of as many bytes to the other pair."""
    request = request_of(tiny_llama(num_key_value_heads=kv_heads), "4xH100-80GB", global_batch=4, sequence_length=128)
    found = {
        attention: rows(traffic(request, cp=4, microbatches=4, attention=attention, ulysses=2), "cp")
        for attention in ("ring", "gather")
    }
    tokens, kv = 6 * 4 * 32, travelling * 32 * 2 * 2
    heads = tokens * (8 * 32 * 2 * 2 + kv) / 2
    both = {("all_to_all", phase): (heads, 96) for phase in ("forward", "backward")}
    once = tokens * kv
    assert found["ring"] == {**both, ("send", "forward"): (once, 24), ("send", "backward"): (2 * once, 48)}
    assert found["gather"] == {
        **both,
        ("all_gather", "forward"): (once, 48),
        ("all_gather", "backward"): (once, 48),
        ("reduce_scatter", "backward"): (once, 48),
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dispatcher", ["pairs", "tokens", "gather"])
def test_collectives_of_the_dispatchers(dispatcher: str, recompute: str) -> None:
    """4 blocks, top 2 of 8, 64 tokens of 128 bf16 numbers; 7 of 8 parts leave the rank. Recompute repeats the forward,
    without the last reduce-scatter: nothing after it is saved."""
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=8, sequence_length=64)
    found = rows(traffic(request, dp_shard=8, ep=8, zero=1, dispatcher=dispatcher, policy=recompute), "ep")
    again = int(recompute == "full")
    stream, reached = 64 * 128 * 2, 8 * (1 - math.comb(7, 2) / math.comb(8, 2))
    weights = 64 * 2 * 4  # Mixtral weighs in float32
    there, back, counts = {
        "pairs": (4 * stream, 4 * stream, (2, 2)),  # 8 counts are small
        "tokens": (16 * 8 + reached * (2 * stream + 2 * weights), reached * (2 * stream + weights), (4, 3)),
        "gather": (8 * (stream + 3 * weights), 8 * stream, (3, 1)),
    }[dispatcher]
    name = "all_gather" if dispatcher == "gather" else "all_to_all"
    expected = {
        (name, "forward"): (pytest.approx(4 * 7 / 8 * there), 4 * counts[0]),
        (name, "backward"): (pytest.approx(4 * 7 / 8 * (back + again * there)), 4 * (counts[1] + again * counts[0])),
    }
    if dispatcher == "gather":
        expected["reduce_scatter", "forward"] = (4 * 7 * stream, 4)
        expected["reduce_scatter", "backward"] = (4 * 7 * (stream + weights), 8)
    assert found == expected
    assert rows(traffic(request, dp_shard=8, ep=1, zero=1), "ep") == {}


@pytest.mark.parametrize(("dispatcher", "collective"), [("pairs", "all_to_all"), ("gather", "all_gather")])
def test_float8_halves_the_way_to_experts_in_the_forward(dispatcher: str, collective: str) -> None:
    """128 bf16 numbers are 256 bytes, in float8 132 with their scale."""
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=8, sequence_length=64)
    plain, packed = (
        rows(traffic(request, dp_shard=8, ep=8, zero=1, dispatcher=dispatcher, wire=wire), "ep")
        for wire in ("activations", "float8")
    )
    sent = 64 * (2 if dispatcher == "pairs" else 8)
    saved = plain[collective, "forward"][0] - packed[collective, "forward"][0]
    assert saved == pytest.approx(4 * 7 / 8 * sent * (256 - 132))
    assert {key: count for key, (_, count) in plain.items()} == {key: count for key, (_, count) in packed.items()}
    assert {key: value for key, value in plain.items() if key[1] == "backward"} == {
        key: value for key, value in packed.items() if key[1] == "backward"
    }


@pytest.mark.parametrize("dispatcher", ["pairs", "tokens", "gather"])
def test_chunks_are_more_collectives_of_the_same_bytes(dispatcher: str) -> None:
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=8, sequence_length=64)
    whole, halves = (
        rows(traffic(request, dp_shard=8, ep=8, zero=1, dispatcher=dispatcher, chunks=chunks), "ep")
        for chunks in (1, 2)
    )
    assert {key: 2 * count for key, (_, count) in whole.items()} == {key: count for key, (_, count) in halves.items()}
    counts = 4 * 7 / 8 * 16 * 8 if dispatcher == "tokens" else 0  # of rows per rank: 16 numbers, once more
    for key, (nbytes, _) in whole.items():
        assert halves[key][0] == pytest.approx(nbytes + (counts if key[1] == "forward" else 0)), key


def test_experts_are_reduced_over_the_ranks_that_hold_them() -> None:
    """Experts of each of 4 blocks are a unit on edp: 2 of 8 ranks have the same ones."""
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=8, sequence_length=64)
    apart, together = (traffic(request, dp_shard=8, ep=ep, zero=3) for ep in (4, 1))
    assert rows(apart, "dp_shard").keys() == rows(together, "dp_shard").keys()
    assert [count for _, count in rows(apart, "dp_shard").values()] == [5, 5, 5]
    assert [count for _, count in rows(apart, "edp").values()] == [4, 4, 4]
    assert rows(together, "edp") == {}
    experts = 4 * 8 * 3 * 128 * request.shape.kinds[0].moe.expert_width  # type: ignore[union-attr]
    assert rows(apart, "edp")["all_gather", "forward"][0] == 1 / 2 * 2 * experts / 4
    moved = [rows(found, "dp_shard")["all_gather", "forward"][0] for found in (together, apart)]
    assert moved[0] - moved[1] == 7 / 8 * 2 * experts


@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_ranks_with_full_experts_send_a_part_of_the_tokens(sequence: bool) -> None:
    """Two tensor ranks: half of the tokens each, or all of them if they shard the width of experts."""
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=4, sequence_length=64)
    keys = {"dp_shard": 4, "tp": 2, "ep": 4, "zero": 1, "sequence_parallel": sequence}
    part, full = (one(traffic(request, **keys, tensor=tensor).of("ep")[0]) for tensor in ("folded", "width"))
    assert full == pytest.approx(2 * part, rel=0.01)  # the counts are the same


@pytest.mark.parametrize("policy", ["none", "full"])
def test_full_experts_have_no_entry_and_no_exit(policy: str) -> None:
    """4 blocks with attention and experts. With a slice of the sequence nothing is sent around experts; without it a
    rank takes a share of 63 tokens, padded to 64, and gathers the outputs."""
    request = request_of(tiny_mixtral(), "2xH100-80GB", global_batch=1, sequence_length=63)
    again = int(policy == "full")
    keys = {"tp": 2, "policy": policy}
    found = rows(traffic(request, **keys, ep=2, sequence_parallel=True), "tp")
    assert found["reduce_scatter", "forward"][1] == found["reduce_scatter", "backward"][1] / (1 + again) == 4
    assert found["all_gather", "forward"][1] == 4 + 1
    shares = rows(traffic(request, **keys, ep=2, sequence_parallel=False), "tp")
    alike = rows(traffic(request, **keys, ep=1, sequence_parallel=False), "tp")
    stream, weights = 64 * 128 * 2, 64 * 2 * 4
    assert shares["all_gather", "forward"] == (4 / 2 * stream, 4)
    assert shares["all_gather", "backward"] == (4 / 2 * (stream + weights), 8)  # the outputs are not gathered again
    counts = [[sent["all_reduce", phase][1] for phase in ("forward", "backward")] for sent in (alike, shares)]
    assert counts[0][0] - counts[1][0] == 4  # exits of experts, which are not recomputed
    assert counts[0][1] - counts[1][1] == 4 * 2  # entries of tokens and of weights


def test_replicas_of_experts_on_tensor_ranks_sum_their_gradients() -> None:
    """Four tensor ranks, two with the same experts: one all-reduce for each of 2 tensors of 4 blocks."""
    request = request_of(tiny_mixtral(), "4xH100-80GB", global_batch=1, sequence_length=64)
    found = rows(traffic(request, tp=4, ep=2, preset="fp32"), "edp")
    experts = 4 * 8 * 3 * 128 * request.shape.kinds[0].moe.expert_width  # type: ignore[union-attr]
    assert found == {("all_reduce", "update"): (experts / 2 * 4, 8)}
    assert rows(traffic(request, tp=2, ep=2), "edp") == {}
    sharded = rows(traffic(request, tp=4, ep=2, zero=3), "edp")
    assert {key: count for key, (_, count) in sharded.items()} == {
        ("all_gather", "forward"): 4, ("all_gather", "backward"): 4, ("reduce_scatter", "backward"): 4,
    }  # fmt: skip


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


def matrices(request: Request) -> tuple[int, int, int]:
    """Inputs a token, outputs a token and weights of all linears of a block, in bytes of bf16."""
    linears = request.shape.kinds[0].linears
    return (
        2 * sum(linear.in_features for linear in linears),
        2 * sum(linear.out_features for linear in linears),
        2 * sum(linear.num_parameters for linear in linears),
    )


@pytest.mark.parametrize(("tp", "mode", "layers"), [(4, "2d", 1), (8, "2.5d", 2)])
def test_squares_pass_panels_of_activations_and_of_weights(tp: int, mode: str, layers: int) -> None:
    """SUMMA on 2 x 2: two panels of inputs and two of weights pass every rank. Layers have their own tokens and all
    weights. The head passes its table and reduces its logits, the ends' norm its statistics."""
    request = request_of(tiny_llama(), f"{tp}xH100-80GB", global_batch=16, sequence_length=128)
    found = rows(traffic(request, tp=tp, mode=mode, sequence_parallel=False, microbatches=4), "tp")
    inputs, _, weights = matrices(request)
    tokens, table = 4 * 128 / layers, 512 * 256 * 2
    panels = 2 * 6 * (inputs * tokens / 4 + weights / 4)
    logits = tokens / 2 * 512 * 2
    assert found["broadcast", "forward"] == (4 * (panels + table / 2), 4 * (6 * 7 * 4 + 2))
    assert found["reduce", "forward"] == (4 * logits, 4 * 2)
    assert found["broadcast", "backward"] == (4 * (panels + table / 2 + logits), 4 * (6 * 7 * 4 + 4))
    assert found["reduce", "backward"] == (4 * (panels + table / 2), 4 * (6 * 7 * 4 + 2))
    assert found["all_gather", "forward"] == (4 * tokens * 8 / 2, 4)  # the tokens' numbers
    assert found["reduce_scatter", "forward"] == (4 * tokens * 256 / 2 * 2 / 2, 4)
    statistics = 13 * tokens / 2 * 4
    assert found["all_reduce", "backward"] == (4 * statistics * 2 / 2, 4 * 13)


def test_a_cube_gathers_inputs_and_weights_and_scatters_outputs() -> None:
    """2 x 2 x 2: half of the tokens' half inputs, a quarter of the weights, of each of which half comes from others."""
    request = request_of(tiny_llama(), "8xH100-80GB", global_batch=16, sequence_length=128)
    found = rows(traffic(request, tp=8, mode="3d", sequence_parallel=False, microbatches=4), "tp")
    inputs, outputs, weights = matrices(request)
    tokens, table = 4 * 128, 512 * 256 * 2
    gathered = 6 * (inputs * tokens / 4 + weights / 4) + STREAM + table / 4
    scattered = 6 * outputs * tokens / 4 + tokens * 512 * 2 / 4
    ids, embedded = tokens * 8 * 3 / 4, tokens * 256 * 2 / 2 * 3 / 4
    assert found["all_gather", "forward"] == (4 * (gathered / 2 + ids), 4 * (2 * 43 + 1))
    assert found["reduce_scatter", "forward"] == (4 * (scattered / 2 + embedded), 4 * (43 + 1))
    assert found["all_gather", "backward"] == (4 * ((gathered + scattered) / 2 + embedded), 4 * (3 * 43 + 1))
    assert found["reduce_scatter", "backward"] == (4 * gathered / 2, 4 * 2 * 43)


@given(zero=st.sampled_from([1, 2, 3]), shards=st.integers(2, 16), vocab=st.integers(8, 700), m=st.integers(1, 4))
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
@settings(max_examples=20)
def test_rows_are_finite_and_non_negative_and_idle_axes_are_silent(request: Request) -> None:
    columns = legal_plans(request)
    if not len(columns):
        return
    silent = {
        "tp": columns.tp == 1,
        "cp": columns.cp == 1,
        "pp": columns.pp == 1,
        "ep": columns.ep == 1,
        "edp": (columns.edp == 1) | (columns.ep == 1),
        "dp_shard": columns.shards == 1,
        "dp_inside": columns.reduce_neighbours == 0,
        "dp_between": columns.reduce_neighbours == 0,
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
@settings(max_examples=10)
def test_every_microbatch_costs_tensor_traffic_alike(request: Request, data: st.DataObject) -> None:
    """Twice the micro-batches of half the size move the same activations: bytes follow tokens, but for the update."""
    columns = legal_plans(request)
    chosen = np.flatnonzero((columns.tp > 1) & (columns.pp == 1) & (columns.tp_mode == 0) & (columns.microbatches > 1))
    if not len(chosen):
        return
    row = int(chosen[data.draw(st.integers(0, len(chosen) - 1))])
    many = columns.take([row])
    merged = replace(many, microbatches=np.ones(1, dtype=np.int64))
    found = [estimate_traffic(views_of(request, table)[0]) for table in (many, merged)]
    moved = [sum(one(each.of("tp", phase=phase)[0]) for phase in ("forward", "backward")) for each in found]
    assert moved[0] == pytest.approx(moved[1])
