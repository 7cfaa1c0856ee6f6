"""A rank's peak, term by term: textbook states, the loss, pipelines; what holds for every legal plan."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import assert_terms_add_up, columns_with, legal_plans, one, request_of, requests, tiny_llama

from weft import hardware
from weft.core.model_shape import ModelShape
from weft.core.terms import MemoryTerm as Term
from weft.plan.memory.peak import COMMUNICATOR_BYTES, MATMUL_WORKSPACE_BYTES, MemoryEstimate, estimate_memory
from weft.plan.request import Request
from weft.plan.view import views_of

SEVEN_BILLION = 7e9
STATES = (Term.WEIGHTS, Term.GRADIENTS, Term.OPTIMIZER_STATE)


def memory(request: Request, **plan: Any) -> MemoryEstimate:
    return estimate_memory(views_of(request, columns_with(plan)))


def terms(request: Request, **plan: Any) -> dict[Term, float]:
    return {term: one(values) for term, values in memory(request, **plan).terms.items()}


def peak_at(request: Request, **plan: Any) -> str:
    found = memory(request, **plan)
    return found.instant[int(one(found.at))]


def textbook() -> Request:
    """Two-byte weights and gradients, Adam's two float32 moments, no master: 12 bytes a parameter. Hardly a token."""
    request = request_of("llama-2-7b", global_batch=16, sequence_length=1)
    low = {"master_weights": "bfloat16", "gradients": "bfloat16", "reduce": "bfloat16"}
    return replace(request, precision=request.precision.model_copy(update=low))


@pytest.mark.parametrize(
    ("plan", "bytes_a_parameter", "textbook_gb"),
    [
        ({"dp_replicate": 8}, 12, 84),
        # fully_shard keeps its own shard beside the gathered weights: 2/8 above the textbook's 5 and 3.25. ZeRO-1
        # adds micro-batches up in float32, whatever travels: 2 above the textbook's 5.
        ({"dp_shard": 8, "zero": 1}, 7 + 2 / 8, 49),
        ({"dp_shard": 8, "zero": 2}, 3.25 + 2 / 8, 22.75),
    ],
)
def test_states_of_seven_billion_parameters_on_eight_devices(
    plan: dict[str, Any], bytes_a_parameter: float, textbook_gb: float
) -> None:
    request = textbook()
    found = terms(request, microbatches=2, **plan)
    states = sum(found[term] for term in (*STATES, Term.GATHERED)) / request.shape.num_parameters
    assert states == pytest.approx(bytes_a_parameter, rel=1e-3)
    shard = 2 / 8 if plan.get("zero") else 0
    assert (states - shard) * SEVEN_BILLION / 1e9 == pytest.approx(textbook_gb, rel=1e-3)


def test_zero_3_states_of_seven_billion_parameters() -> None:
    """12 / 8 bytes a parameter: 10.5 GB; gathered blocks are another term."""
    request = textbook()
    found = terms(request, dp_shard=8, zero=3, microbatches=2)
    states = sum(found[term] for term in STATES) / request.shape.num_parameters
    assert states * SEVEN_BILLION / 1e9 == pytest.approx(10.5)


@pytest.mark.parametrize(("preset", "cast"), [("bf16", 2), ("fp16", 2), ("fp32", 0)])
def test_adam_takes_sixteen_bytes_a_parameter(preset: str, cast: int) -> None:
    """4 + 4 + 8 whatever the compute dtype; mixed precision has its two-byte weights besides."""
    request = request_of(global_batch=16, sequence_length=1, preset=preset)
    size = request.shape.num_parameters
    replicated = terms(request, dp_replicate=8, microbatches=2)
    assert sum(replicated[term] for term in STATES) == 16 * size
    assert replicated[Term.GATHERED] <= cast * size
    assert replicated[Term.GATHERED] > 0.9 * cast * size - 1
    sharded = terms(request, dp_shard=8, zero=3, microbatches=2)
    assert sum(sharded[term] for term in STATES) == 16 * size / 8


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputed_blocks_cast_their_weights_again(policy: str) -> None:
    """Replicated bf16: only the head's cast and that of one block are alive, not the model's."""
    request = request_of(global_batch=16, sequence_length=4096, preset="bf16")
    size, head = request.shape.num_parameters, request.shape.embedding_parameters
    kept, recomputed = (
        terms(request, dp_replicate=8, microbatches=2, policy=name)[Term.GATHERED] for name in ("none", policy)
    )
    assert kept > 0.9 * 2 * size
    assert 2 * head <= recomputed < 2 * head + 1.1 * 2 * (size - 2 * head) / request.shape.num_layers


@pytest.mark.parametrize(
    ("workload", "state_bytes"),
    [
        ({"optimizer": "adamw"}, 8),
        ({"optimizer": "sgd"}, 4),
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "adamw8bit"}, 2 + 8 / 256),
    ],
)
def test_optimizer_states(workload: dict[str, Any], state_bytes: float) -> None:
    request = request_of(**workload)
    found = terms(request, dp_shard=8, zero=3)
    assert found[Term.OPTIMIZER_STATE] == pytest.approx(state_bytes * request.shape.num_parameters / 8)


@pytest.mark.parametrize("plan", [{"dp_replicate": 2}, {"zero": 3, "dp_shard": 2}])
def test_foreach_brings_four_bytes_a_parameter_to_the_update(plan: dict[str, Any]) -> None:
    """Hardly a token, so the update is the peak: 4 + 8 + 4 bytes, and 4 more for a list of temporaries."""
    request = request_of("llama-2-7b", "2xH100-80GB", global_batch=2, sequence_length=1, optimizer_kernel="foreach")
    assert peak_at(request, **plan) == "update"
    held = request.shape.num_parameters / plan.get("dp_shard", 1)
    found = terms(request, **plan)
    assert found[Term.TEMPORARIES] - MATMUL_WORKSPACE_BYTES == pytest.approx(4 * held, rel=1e-6)
    assert sum(found[term] for term in STATES) == pytest.approx(16 * held, rel=1e-6)


def test_an_optimizer_on_the_host_has_its_temporaries_there() -> None:
    plan = {"dp_shard": 2, "zero": 3, "optimizer": "cpu"}
    low: dict[str, Any] = {"devices": "2xH100-80GB", "global_batch": 2, "sequence_length": 1}
    fused, foreach = (
        terms(request_of("llama-2-7b", optimizer_kernel=kernel, **low), **plan) for kernel in ("fused", "foreach")
    )
    assert fused == foreach


def test_the_loss_of_a_large_vocabulary_is_the_peak() -> None:
    """8,192 tokens x 128,256 x 12 bytes = 12.6 GB; no gradient is alive yet, nothing is gathered."""
    request = request_of(global_batch=8, sequence_length=8192)
    plan: dict[str, Any] = {"dp_shard": 8, "zero": 3, "policy": "full"}
    assert peak_at(request, **plan) == "loss"
    found = terms(request, **plan)
    assert found[Term.LOGITS] == 8192 * 128_256 * 12
    assert found[Term.GRADIENTS] == 0
    assert found[Term.GATHERED] == 0
    # 32 inputs of bf16, and the final norm's float32 input and two bf16 tensors
    assert found[Term.ACTIVATIONS] == 8192 * 4096 * (32 * 2 + 4 + 2 * 2)


def test_without_recomputation_every_layer_keeps_its_200_840_bytes() -> None:
    request = request_of(global_batch=8, sequence_length=8192)
    found = terms(request, dp_shard=8, zero=3, policy="none")
    assert peak_at(request, dp_shard=8, zero=3, policy="none") == "loss"
    assert found[Term.ACTIVATIONS] == 8192 * (32 * (200_832 + 8) + 4096 * 8)


def test_loss_parallel_shards_the_logits() -> None:
    request = request_of(global_batch=1, sequence_length=8192)
    whole, sharded = (
        terms(request, tp=8, loss_parallel=parallel, policy="none")[Term.LOGITS] for parallel in (False, True)
    )
    assert whole == 8192 * 128_256 * 12
    assert sharded == 8192 * 128_256 / 8 * 4 + 2**26 * 8  # logits and gradient in bf16; one chunk, twice in float32


def test_gpt2_xl_activations_of_the_zero_paper() -> None:
    """1.5B, 1,024 tokens, batch 32. The paper counts 24h bytes a token and layer (60 GB) for fused kernels; HF's eager
    GELU makes it 58h. With checkpoints both say: 48 inputs (5.0 GB) and one layer computed again (3.1 GB): 8 GB."""
    request = request_of("gpt2-xl", "1xH200", global_batch=32, sequence_length=1024, preset="fp16")
    none, full = (terms(request, policy=policy)[Term.ACTIVATIONS] for policy in ("none", "full"))
    tokens, hidden, heads, final_norm = 32 * 1024, 1600, 25, 8 * 1600
    a_layer = 58 * hidden + 4 * heads + 16
    assert none == tokens * (48 * a_layer + final_norm)
    assert full == tokens * (48 * 2 * hidden + final_norm)
    assert (full + tokens * (a_layer - 2 * hidden)) / 1e9 == pytest.approx(8.4, abs=0.1)


def test_the_first_stage_of_1f1b_keeps_p_microbatches_and_of_gpipe_all() -> None:
    shape = tiny_llama(num_hidden_layers=8, hidden_size=1024, intermediate_size=4096, vocab_size=64)
    request = request_of(shape, "8xH100-80GB", global_batch=64, sequence_length=2048)
    kept = {
        schedule: estimate_memory(
            views_of(request, columns_with({"pp": 8, "microbatches": 64, "schedule": schedule}))[:1]
        ).terms[Term.ACTIVATIONS]
        for schedule in ("1f1b", "gpipe")
    }
    assert one(kept["gpipe"]) == pytest.approx(one(kept["1f1b"]) * 64 / 8, rel=0.01)


def test_the_last_stage_has_the_logits_and_may_be_the_fullest() -> None:
    shape = tiny_llama(num_hidden_layers=8, vocab_size=200_000)
    request = request_of(shape, "8xH100-80GB", global_batch=8, sequence_length=4096)
    found = memory(request, pp=8, microbatches=8)
    assert one(found.place) == 2
    assert one(found.terms[Term.LOGITS]) == 4096 * 200_000 * 12


def test_older_weight_versions_are_counted() -> None:
    shape = tiny_llama(num_hidden_layers=8)
    request = request_of(shape, "4xH100-80GB", global_batch=8, sequence_length=16)
    stash = estimate_memory(
        views_of(request, columns_with({"pp": 4, "microbatches": 8, "schedule": "pipedream"}))[:1]
    ).terms[Term.WEIGHT_VERSIONS]
    held = views_of(request, columns_with({"pp": 4, "microbatches": 8}))[0].share.total.unsharded
    assert one(stash) == 3 * one(held) * 4  # kept as the masters are: float32
    assert terms(request, pp=4, microbatches=8)[Term.WEIGHT_VERSIONS] == 0


@pytest.mark.parametrize(("layers", "units"), [(1, 1), (6, 2)])
def test_zero_3_gathers_the_root_the_block_in_use_and_the_next(layers: int, units: int) -> None:
    """A model of one block has no next one."""
    shape = tiny_llama(num_hidden_layers=layers)
    request = request_of(shape, "4xH100-80GB", global_batch=16, sequence_length=1)
    found = terms(request, dp_shard=4, zero=3, microbatches=4)
    root = 2 * 512 * 256 + 256
    assert found[Term.GATHERED] == 2 * (root + units * shape.kinds[0].num_parameters)


def test_every_axis_in_use_brings_a_communicator() -> None:
    request = request_of(devices="2x8xH100-80GB", sequence_length=16)
    plans = ({"dp_replicate": 16}, {"dp_replicate": 8, "tp": 2}, {"dp_replicate": 4, "tp": 2, "pp": 2})
    overhead = [terms(request, microbatches=2, **plan)[Term.FRAMEWORK] for plan in plans]
    steps = np.diff(overhead) / COMMUNICATOR_BYTES
    assert steps.tolist() == pytest.approx([1, 1], abs=0.8)  # less the fragmentation that cutting saves
    assert overhead[0] > request.cluster.device.overhead_bytes + COMMUNICATOR_BYTES


def test_a_cpu_has_no_framework_term_and_no_workspace() -> None:
    on_cpu = request_of(tiny_llama(), "1xCPU", global_batch=1, sequence_length=64, preset="fp32")
    on_gpu = replace(on_cpu, cluster=hardware.cluster("1xH200"))
    assert terms(on_cpu)[Term.FRAMEWORK] == 0
    difference = terms(on_gpu)[Term.TEMPORARIES] - terms(on_cpu)[Term.TEMPORARIES]
    assert difference == MATMUL_WORKSPACE_BYTES


def test_the_middle_stage_can_be_the_fullest() -> None:
    """405B with ZeRO-1 on 16 stages: the middle has 8 blocks, the first 7 and the table."""
    request = request_of("llama-3.1-405b", "2048x8xH100-80GB", global_batch=2048, sequence_length=64)
    found = memory(request, dp_shard=128, tp=8, pp=16, zero=1, microbatches=16, schedule="gpipe", policy="full")
    assert found.instant[int(one(found.at))]
    assert one(found.place) in (0, 1, 2)
    firsts = estimate_memory(views_of(request, columns_with(
        {"dp_shard": 128, "tp": 8, "pp": 16, "zero": 1, "microbatches": 16, "schedule": "gpipe", "policy": "full"}
    ))[:1])  # fmt: skip
    assert one(found.total) >= one(firsts.total)


@given(request=requests())
@settings(max_examples=20)
def test_terms_are_finite_non_negative_and_add_up(request: Request) -> None:
    """Every legal plan of the request at once."""
    columns = legal_plans(request)
    if not len(columns):
        return
    found = estimate_memory(views_of(request, columns))
    assert_terms_add_up(found.terms, found.total)
    assert Term.OTHER not in found.terms  # nothing predicted is unexplained


@st.composite
def sharded_plans(draw: st.DrawFn) -> dict[str, Any]:
    """Any sharded layout but its degree."""
    zero = draw(st.sampled_from([1, 2, 3]))
    pp = draw(st.sampled_from([1, 2]))
    return {
        "zero": zero,
        "tp": draw(st.sampled_from([1, 2, 4])),
        "pp": pp,
        "cp": draw(st.sampled_from([1, 2])),
        "dp_replicate": draw(st.sampled_from([1, 2])),
        "microbatches": draw(st.sampled_from([2, 4])) if pp > 1 else draw(st.sampled_from([1, 4])),
        "policy": draw(st.sampled_from(["none", "selective", "full"])),
        "optimizer": draw(st.sampled_from(["none", "cpu"])),
    }


def by_degree(shape: ModelShape, plan: dict[str, Any], *, tokens: int, preset: str) -> list[dict[Term, float]]:
    """The plan on 2, 4, 8, … shards, each rank with the same tokens."""
    found = []
    for degree in (2, 4, 8, 16, 32, 64):
        batch = degree * plan["dp_replicate"] * plan["microbatches"]
        request = request_of(shape, "1024x8xH100-80GB", global_batch=batch, sequence_length=tokens, preset=preset)
        found.append(terms(request, dp_shard=degree, **plan))
    return found


@given(plan=sharded_plans(), tokens=st.sampled_from([16, 512, 8192]), preset=st.sampled_from(["fp32", "bf16"]))
@settings(max_examples=30)
def test_memory_never_rises_with_the_shard_degree(plan: dict[str, Any], tokens: int, preset: str) -> None:
    """Where rows divide: sharding further can only take bytes away."""
    shape = tiny_llama(hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_key_value_heads=8)
    totals = [sum(found.values()) for found in by_degree(shape, plan, tokens=tokens, preset=preset)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(totals)), totals


@given(
    plan=sharded_plans(),
    hidden=st.integers(1, 20).map(lambda n: 16 * n),
    width=st.integers(1, 300).map(lambda n: 4 * n),
    vocab=st.integers(10, 5000),
)
@settings(max_examples=10)
def test_states_never_rise_with_the_shard_degree_even_where_rows_do_not_divide(
    plan: dict[str, Any], hidden: int, width: int, vocab: int
) -> None:
    """Gathered units may: their padding is sent and stored (9 rows are 10 on 2 ranks and 12 on 4)."""
    shape = tiny_llama(hidden_size=hidden, intermediate_size=width, vocab_size=vocab)
    plan["pp"] = 1  # the terms are those of the fullest stage, and which one that is may change with the degree
    held = [
        (found[Term.WEIGHTS], found[Term.OPTIMIZER_STATE]) for found in by_degree(shape, plan, tokens=32, preset="bf16")
    ]
    for before, after in pairwise(held):
        assert all(now <= then for now, then in zip(after, before, strict=True))


def test_a_plan_costs_the_same_beside_a_mixture_of_recompute() -> None:
    """Instants of a mixture are those of the plans that have one."""
    request = request_of("llama-3-8b", "2xRTX4090", global_batch=12, sequence_length=512, preset="fp32")
    alone = {"dp_shard": 2, "zero": 3, "preset": "fp32", "microbatches": 6}
    mixed = {"dp_shard": 2, "zero": 3, "preset": "fp32", "policy": "budget", "mixture": (0, 19)}
    first, both = (estimate_memory(views_of(request, columns_with(*plans))) for plans in ([alone], [alone, mixed]))
    assert first.total[0] == both.total[0]
