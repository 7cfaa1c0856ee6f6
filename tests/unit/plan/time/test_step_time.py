"""Seconds of a step: terms add up, the slowest stage sets the pace, what hides hides, and the rest is exposed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from plan_cases import assert_terms_add_up, columns_with, legal_plans, one, request_of, requests, view_with

from weft import zoo
from weft.core.cluster import Link
from weft.core.terms import StepTerm as Term
from weft.plan.cp.sizes import WORK
from weft.plan.request import Request
from weft.plan.time.compute import block_seconds, model_flops
from weft.plan.time.state_stream import UPDATE_PASSES
from weft.plan.time.step_time import CONTENTION, EXPOSED_SENDS, TimeEstimate, estimate_time
from weft.plan.time.transfers import OVERLAP
from weft.plan.view import View, busiest_view, views_of

REQUEST = request_of(global_batch=64, sequence_length=4096)
DEVICE = REQUEST.cluster.device
EVENLY: dict[str, Any] = {"pp": 8, "microbatches": 64, "blocks": [4] * 8}
HEAD_BLOCKS = 128_256 * 4096 / (REQUEST.shape.kinds[0].linear_flops_per_token / 2)  # the head's cost in blocks
BANDWIDTH = DEVICE.memory_bytes_per_s * DEVICE.memory_share


def time_of(request: Request = REQUEST, **plan: Any) -> TimeEstimate:
    return estimate_time(views_of(request, columns_with(plan)))


def terms(request: Request = REQUEST, **plan: Any) -> dict[Term, float]:
    return {term: one(values) for term, values in time_of(request, **plan).terms.items()}


def on_network(request: Request, bytes_per_s: float) -> Request:
    slow = Link(name="slow", latency_s=0.0, bytes_per_s=bytes_per_s)
    return replace(request, cluster=replace(request.cluster, inside=slow, between=slow))


def test_terms_add_up_and_every_term_has_its_place() -> None:
    found = time_of(dp_shard=8, zero=3)
    assert one(found.total) == pytest.approx(sum(one(values) for values in found.terms.values()))
    assert set(found.terms) == set(Term)


def test_throughput_and_mfu_follow_from_the_step() -> None:
    found = time_of(dp_shard=8, zero=3)
    step = one(found.total)
    assert one(found.tokens_per_s) == pytest.approx(64 * 4096 / step)
    assert one(found.mfu) == pytest.approx(model_flops(REQUEST) / step / 8 / DEVICE.peak_flops["bfloat16"])
    assert 0.2 < one(found.mfu) < 0.72


def test_matmuls_take_three_forwards_a_microbatch() -> None:
    busy = block_seconds(view_with(REQUEST, dp_shard=8, zero=3, microbatches=4))
    expected = 3 * 4 * (one(busy.matmul_forward) + one(busy.head_forward))
    assert terms(dp_shard=8, zero=3, microbatches=4)[Term.MATMUL] == pytest.approx(expected)


@pytest.mark.parametrize(("plan", "held"), [({"dp_replicate": 8}, 1.0), ({"dp_shard": 8, "zero": 1}, 1 / 8)])
def test_the_update_reads_and_writes_weights_gradients_and_moments(plan: dict[str, Any], held: float) -> None:
    """2 x 4 of weights, 4 of gradients, 2 x 8 of moments: 28 bytes a parameter held."""
    expected = UPDATE_PASSES * 28 * REQUEST.shape.num_parameters * held / BANDWIDTH
    assert terms(**plan)[Term.OPTIMIZER] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "v", "ratio"),
    [("1f1b", 1, 3 / 16), ("gpipe", 1, 3 / 16), ("interleaved_1f1b", 2, 3 / 32), ("naive", 1, 3)],
)
def test_the_bubble_is_a_share_of_the_microbatches(schedule: str, v: int, ratio: float) -> None:
    """Idle over busy time: (p - 1) / (v m) of everything that micro-batches take; update and reduction have none."""
    m = 1 if schedule == "naive" else 16
    found = terms(dp_replicate=2, pp=4, microbatches=m, schedule=schedule, virtual_stages=v)
    busy = sum(found.values()) - sum(found[term] for term in (Term.BUBBLE, Term.DP_COMM, Term.OPTIMIZER, Term.OFFLOAD))
    assert found[Term.BUBBLE] == pytest.approx(busy * ratio)


def test_no_pipeline_no_bubble() -> None:
    assert terms(dp_shard=8, zero=3)[Term.BUBBLE] == 0


def test_the_slowest_stage_sets_the_pace() -> None:
    """Dealt evenly, the last stage of 8B has as many blocks as the others and the head of 128,256 rows besides."""
    views = views_of(REQUEST, columns_with(EVENLY))
    busy = [one(block_seconds(view).forward) for view in views]
    assert busy[2] == max(busy)
    expected = 3 * 64 * (one(block_seconds(views[2]).matmul_forward) + one(block_seconds(views[2]).head_forward))
    assert terms(**EVENLY)[Term.MATMUL] == pytest.approx(expected)


def test_a_deal_by_cost_is_faster_than_an_even_one() -> None:
    """4, 4, 4, 4, 4, 5, 5 and 2 with the head, instead of 4 with the head."""
    by_cost, evenly = (time_of(**plan) for plan in ({**EVENLY, "blocks": []}, EVENLY))
    expected = one(evenly.terms[Term.MATMUL]) * 5 / (4 + HEAD_BLOCKS)
    assert one(by_cost.terms[Term.MATMUL]) == pytest.approx(expected, rel=0.02)
    assert one(by_cost.total) < 0.9 * one(evenly.total)


def test_the_slowest_rank_may_hold_less_than_the_fullest() -> None:
    """Of experts a token meets a few: four blocks of Llama 70B take longer than five of Mixtral, which hold more."""
    mixtral, dense = zoo.named("mixtral-8x7b"), zoo.named("llama-3-70b").kinds[0]
    shape = replace(mixtral, kinds=(*mixtral.kinds, dense), order=(0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0))
    request = request_of(shape, "4xH100-80GB", global_batch=64)
    keys: dict[str, Any] = {"pp": 4, "microbatches": 64, "blocks": [1, 4, 5, 2]}
    slow, full = (one(block_seconds(view).matmul_forward) for view in _ranks(request, **keys))
    assert slow > full
    assert terms(request, **keys)[Term.MATMUL] == pytest.approx(3 * 64 * slow)


def _ranks(request: Request, **keys: Any) -> tuple[View, View]:
    """The busiest rank between the ends, and the fullest."""
    columns = columns_with(keys)
    busiest = busiest_view(request, columns)
    assert busiest is not None
    return busiest, views_of(request, columns)[1]


def test_gathers_hide_behind_arithmetic_on_a_fast_network() -> None:
    """All but the ends and what contention costs the arithmetic."""
    fast, free = (terms(on_network(REQUEST, rate), dp_shard=8, zero=3)[Term.DP_COMM] for rate in (350e9, 1e30))
    assert free == pytest.approx(0, abs=1e-6)
    wire = 7 / 8 * REQUEST.shape.num_parameters * (2 + 2 + 4) / 350e9
    assert CONTENTION * wire < fast < wire / 4


def test_what_outlasts_the_arithmetic_is_exposed() -> None:
    """On 1 GB/s everything is: gathers and reductions take 56 s beside 1.5 s of arithmetic."""
    slow = on_network(REQUEST, 1e9)
    wire = 7 / 8 * REQUEST.shape.num_parameters * (2 + 2 + 4) / 1e9
    found = terms(slow, dp_shard=8, zero=3)
    assert found[Term.DP_COMM] == pytest.approx(wire, rel=0.1)
    replicated = terms(slow, dp_replicate=8)
    assert replicated[Term.DP_COMM] == pytest.approx(2 * 7 / 8 * REQUEST.shape.num_parameters * 4 / 1e9, rel=0.1)


def test_zero_3_pays_for_every_microbatch_on_a_slow_network() -> None:
    slow = on_network(REQUEST, 1e9)
    once, often = (terms(slow, dp_shard=8, zero=3, microbatches=m)[Term.DP_COMM] for m in (1, 8))
    assert often == pytest.approx(8 * once, rel=0.1)
    first = [terms(slow, dp_shard=8, zero=1, microbatches=m)[Term.DP_COMM] for m in (1, 8)]
    assert first[1] == pytest.approx(first[0], rel=0.1)


def test_zero_1_reduces_beside_the_last_backward_only() -> None:
    """As many bytes with 8 micro-batches as with 1, and an eighth of the backward to hide them: 8 rows become 1."""
    slow = on_network(REQUEST, 40e9)
    once, often = (terms(slow, dp_shard=8, zero=1, microbatches=m)[Term.DP_COMM] for m in (1, 8))
    reduction = 7 / 8 * REQUEST.shape.num_parameters * 4 / 40e9
    assert once < reduction / 2 < often


def test_gradients_of_replicas_go_through_every_card_that_context_ranks_have() -> None:
    """Two nodes of four: replicas on two nodes, four context ranks in each. All eight reduce, over four cards."""
    request = request_of(devices="2x4xH100-80GB", global_batch=64, sequence_length=4096)
    slow = Link(name="slow", latency_s=0.0, bytes_per_s=1e9)
    request = replace(request, cluster=replace(request.cluster, between=slow))
    wire = 2 * 7 / 8 * request.shape.num_parameters * 4 / (4 * 1e9)
    assert terms(request, dp_replicate=2, cp=4, microbatches=32)[Term.DP_COMM] == pytest.approx(wire, rel=0.1)


def test_a_ring_hides_behind_attention() -> None:
    """Keys and values of 8B: 7 passes of 512 tokens x 2 x 1,024 numbers a layer, three times; the rest is hidden."""
    ring: dict[str, Any] = {"cp": 8, "microbatches": 64, "attention": "ring"}
    fast, slow = (terms(on_network(REQUEST, rate), **ring) for rate in (1e30, 1e9))
    assert fast[Term.CP_COMM] == 0
    wire = 3 * 64 * 32 * 7 * 512 * 2 * 1024 * 2 / 1e9
    assert slow[Term.CP_COMM] == pytest.approx(wire - OVERLAP * 7 / 8 * slow[Term.ATTENTION])
    gather = terms(on_network(REQUEST, 1e9), **{**ring, "attention": "gather"})
    assert gather[Term.CP_COMM] == pytest.approx(wire)
    assert gather[Term.ATTENTION] == pytest.approx(slow[Term.ATTENTION] * WORK["gather"] / WORK["ring"])


def test_tensor_communication_is_not_hidden() -> None:
    """Of a stream of 4,096 x 4,096 bf16, for each of 64 sequences: 65 gathers and 64 scatters each way and both ends'
    all-reduces; the loss's three numbers a token; once, the gradients of 64 norms.
    """
    request = on_network(REQUEST, 300e9)
    stream = 4096 * 4096 * 2
    halves = 64 * ((2 * (65 + 64) + 4) * stream + 2 * 3 * 4 * 4096) + 2 * 64 * 4 * (4096 + 1)
    expected = 7 / 8 * halves / 300e9
    assert terms(request, tp=8, microbatches=64)[Term.TP_COMM] == pytest.approx(expected)


def test_a_tenth_of_the_sends_between_stages_shows() -> None:
    request = on_network(REQUEST, 10e9)
    wire = 64 * 4096 * 4096 * 2 / 10e9
    assert terms(request, **EVENLY)[Term.PP_COMM] == pytest.approx(EXPOSED_SENDS * wire)


def test_recomputation_costs_time() -> None:
    none, selective, full = (
        sum(terms(dp_shard=8, zero=3, policy=policy).values()) for policy in ("none", "selective", "full")
    )
    assert none < selective < full < none * 4 / 3 + 0.01


@given(request=requests())
@settings(max_examples=20)
def test_terms_are_finite_non_negative_and_add_up(request: Request) -> None:
    """Every legal plan of the request at once; MFU stays below what a product can reach."""
    columns = legal_plans(request)
    if not len(columns):
        return
    found = estimate_time(views_of(request, columns))
    assert_terms_add_up(found.terms, found.total)
    assert (found.mfu > 0).all()
    assert (found.mfu < 1).all()


def test_a_secondary_shard_keeps_the_gathers_of_the_backward_on_the_node() -> None:
    """On two nodes with a slow link a third of the traffic of shards stays inside."""
    nodes = request_of("llama-3-8b", "2x8xH100-80GB", global_batch=16, sequence_length=512)
    slow = replace(nodes, cluster=replace(nodes.cluster, between=Link(name="slow", latency_s=0.0, bytes_per_s=1e9)))
    plain, near, across = (terms(slow, dp_shard=16, zero=3, secondary_shard=size)[Term.DP_COMM] for size in (0, 8, 16))
    assert across == plain
    assert 0.70 < near / plain < 0.80  # bytes: 2 forward, 2 backward, 4 of gradients in float32
