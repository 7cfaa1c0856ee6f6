"""Each rule refuses what it names and nothing else; what the rules allow, plan files and schedules allow too."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import columns_with, legal_plans, request_of, requests, tiny_llama, tiny_mixtral

from weft.core.plan_checks import check_consistent
from weft.core.precision import resolve
from weft.plan.columns import SCHEDULES
from weft.plan.plan_rows import plan_at
from weft.plan.request import Request
from weft.plan.rules import RULES, check_plan, legal_rows, nearest_legal
from weft.plan.space import Freedom, enumerate_plans
from weft.schedule import check_request

LLAMA = request_of(global_batch=64, sequence_length=4096)  # 32 heads, 8 key-value heads, 32 blocks, 8 H100
QWEN = request_of("qwen2.5-0.5b", global_batch=64, sequence_length=4096)  # 14 heads, 2 key-value heads
MOE = request_of(tiny_mixtral(), global_batch=64, sequence_length=4096)  # 8 experts, 4 blocks
TIED = request_of(tiny_llama(tie_word_embeddings=True), global_batch=64)
ODD_WIDTH = request_of(tiny_llama(intermediate_size=770), global_batch=64, sequence_length=4096)
TWELVE_KV = request_of(tiny_llama(hidden_size=384, num_attention_heads=24, num_key_value_heads=12), global_batch=64)
TWO_NODES = request_of(devices="2x8xH100-80GB", global_batch=64, sequence_length=4096)
CROOKED = replace(LLAMA, shape=replace(LLAMA.shape, has_straight_stream=False))
(KIND,) = LLAMA.shape.kinds
assert KIND.attention is not None
IN_ATTENTION = replace(KIND, attention=replace(KIND.attention, dropout=0.1))
DROPPED = replace(LLAMA, shape=replace(LLAMA.shape, kinds=(IN_ATTENTION,)))
IN_STREAM = replace(LLAMA, shape=replace(LLAMA.shape, dropout=0.1, kinds=(replace(KIND, dropout=0.1),)))
NO_HOST = replace(LLAMA, cluster=replace(LLAMA.cluster, host_memory_bytes=0))
NO_DISK = replace(LLAMA, cluster=replace(LLAMA.cluster, nvme_bytes_per_s=0.0))
WIDE = replace(LLAMA, precision=resolve("bf16", {"residual": "float32"}))
IN_INT8 = replace(LLAMA, precision=resolve("bf16", {"reduce": "int8"}))
GATHERED_IN_INT8 = replace(LLAMA, precision=resolve("bf16", {"gather": "int8"}))

BROKEN: list[tuple[str, Request, dict[str, Any]]] = [
    ("ranks", LLAMA, {"dp_replicate": 4}),
    ("secondary_shard", LLAMA, {"dp_shard": 8, "zero": 2, "secondary_shard": 2}),
    ("secondary_shard", LLAMA, {"dp_shard": 8, "zero": 3, "secondary_shard": 8}),
    ("coded_copies", IN_INT8, {"dp_replicate": 2, "tp": 4, "mode": "2d", "sequence_parallel": False}),
    ("coded_copies", GATHERED_IN_INT8, {"dp_shard": 2, "zero": 3, "tp": 4, "mode": "2d", "sequence_parallel": False}),
    ("reduce_neighbours", IN_INT8, {"dp_replicate": 8, "reduce_neighbours": 3}),
    ("reduce_neighbours", IN_INT8, {"dp_shard": 8, "zero": 2, "reduce_neighbours": 8}),
    ("reduce_neighbours", LLAMA, {"dp_replicate": 8, "reduce_neighbours": 2}),
    ("residual", WIDE, {"dp_replicate": 2, "tp": 4, "mode": "2d", "sequence_parallel": False}),
    (
        "error_feedback",
        LLAMA,
        {"dp_replicate": 2, "tp": 4, "mode": "2d", "sequence_parallel": False, "error_feedback": True},
    ),
    (
        "error_feedback",
        LLAMA,
        {
            "dp_shard": 4,
            "zero": 2,
            "pp": 2,
            "microbatches": 4,
            "schedule": "zbv",
            "virtual_stages": 2,
            "error_feedback": True,
        },
    ),
    ("secondary_layout", LLAMA, {"dp_shard": 4, "zero": 3, "pp": 2, "microbatches": 2, "secondary_shard": 2}),
    ("batch", LLAMA, {"dp_replicate": 8, "microbatches": 3}),
    ("batch", request_of(global_batch=4), {"dp_replicate": 8}),
    ("sequence", request_of(global_batch=64, sequence_length=4100), {"tp": 8}),
    ("sequence", request_of(global_batch=64, sequence_length=1001), {"tp": 8, "sequence_parallel": True}),
    ("heads", QWEN, {"tp": 4, "dp_replicate": 2}),
    ("key_value_heads", TWELVE_KV, {"tp": 8}),
    ("widths", ODD_WIDTH, {"tp": 4, "dp_replicate": 2}),
    ("widths", request_of(tiny_mixtral(intermediate_size=258), global_batch=64), {"tp": 4, "dp_replicate": 2}),
    ("vocabulary", request_of(tiny_llama(vocab_size=9), global_batch=64), {"tp": 8}),
    ("regions", request_of("mamba-2.8b", global_batch=64), {"tp": 8, "sequence_parallel": False}),
    ("stream", CROOKED, {"tp": 8, "sequence_parallel": True}),
    ("node", TWO_NODES, {"tp": 16}),
    ("tensor_mode", LLAMA, {"tp": 8, "mode": "2d", "sequence_parallel": False}),
    ("tensor_mode", LLAMA, {"tp": 4, "dp_replicate": 2, "mode": "2.5d"}),
    ("tensor_mode", LLAMA, {"tp": 4, "dp_replicate": 2, "mode": "3d"}),
    ("tensor_mode", LLAMA, {"tp": 1, "dp_replicate": 8, "mode": "2d"}),
    ("grid", request_of("deepseek-v2-lite", global_batch=64), {"tp": 4, "dp_replicate": 2, "mode": "2d"}),
    ("batch", request_of(global_batch=4), {"tp": 4, "dp_replicate": 2, "mode": "2d", "microbatches": 2}),
    ("experts", LLAMA, {"dp_shard": 8, "zero": 1, "ep": 2}),
    ("experts", request_of(tiny_mixtral(num_local_experts=6), global_batch=64), {"dp_shard": 8, "zero": 1, "ep": 8}),
    ("expert_ranks", MOE, {"dp_shard": 8, "zero": 1, "ep": 3}),
    ("zero", LLAMA, {"dp_shard": 8, "zero": 0}),
    ("stages", MOE, {"pp": 8, "microbatches": 8}),
    ("stages", MOE, {"pp": 4, "dp_replicate": 2, "microbatches": 8, "schedule": "zbv", "virtual_stages": 2}),
    ("blocks", LLAMA, {"pp": 8, "microbatches": 8, "blocks": [4, 4, 4, 4, 4, 4, 4, 3]}),
    ("blocks", LLAMA, {"pp": 8, "microbatches": 8, "blocks": [16, 16]}),
    ("mixture", LLAMA, {"dp_replicate": 8, "policy": "budget", "mixture": [20, 13]}),
    ("virtual_stages", LLAMA, {"pp": 8, "microbatches": 8, "virtual_stages": 2}),
    ("virtual_stages", LLAMA, {"pp": 8, "microbatches": 8, "schedule": "interleaved_1f1b"}),
    ("virtual_stages", LLAMA, {"pp": 8, "microbatches": 8, "schedule": "zbv"}),
    ("virtual_stages", LLAMA, {"dp_replicate": 8, "virtual_stages": 2}),
    ("microbatches", LLAMA, {"pp": 8, "microbatches": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
    ("microbatches", LLAMA, {"pp": 8, "microbatches": 8, "schedule": "dualpipev", "virtual_stages": 2}),
    ("microbatches", LLAMA, {"pp": 8, "microbatches": 4, "schedule": "zbv", "virtual_stages": 2}),
    ("microbatches", LLAMA, {"pp": 8, "microbatches": 4, "schedule": "pipedream_2bw"}),
    ("full_rows", request_of(optimizer="adamw8bit"), {"tp": 8}),
    ("tied_updates", TIED, {"pp": 2, "dp_replicate": 4, "microbatches": 2, "schedule": "pipedream"}),
    ("asynchronous", LLAMA, {"pp": 4, "dp_shard": 2, "zero": 1, "schedule": "pipedream", "microbatches": 8}),
    ("float8", request_of(devices="8xA100-80GB"), {"dp_replicate": 8, "linears": "all"}),
    ("float8_weights", request_of(preset="fp32"), {"dp_replicate": 8, "linears": "auto"}),
    ("float8_blocks", request_of("llama-3.2-1b", preset="bf16"), {"tp": 8, "linears": "all", "recipe": "blockwise"}),
    ("host", NO_HOST, {"dp_replicate": 8, "optimizer": "cpu"}),
    ("host", NO_HOST, {"dp_replicate": 8, "offload_activations": "cpu", "policy": "full"}),
    ("disk", NO_DISK, {"dp_replicate": 8, "optimizer": "nvme"}),
    ("offloaded_activations", LLAMA, {"dp_replicate": 8, "offload_activations": "cpu"}),
    ("offloaded_activations", LLAMA, {"dp_replicate": 8, "offload_activations": "cpu", "policy": "selective"}),
    (
        "offloaded_activations",
        LLAMA,
        {"dp_replicate": 8, "offload_activations": "cpu", "policy": "budget", "mixture": [0, 9]},
    ),
    (
        "offloaded_blocks",
        LLAMA,
        {"dp_replicate": 8, "offload_activations": "cpu", "policy": "full", "offload_blocks": 1},
    ),
    ("partition", LLAMA, {"dp_replicate": 8, "partition": True, "policy": "full"}),
    ("partition", LLAMA, {"tp": 8, "partition": True, "policy": "full"}),
    ("partition", LLAMA, {"tp": 8, "partition": True, "sequence_parallel": False}),
    ("partition", LLAMA, {"tp": 8, "mode": "3d", "partition": True, "policy": "full", "sequence_parallel": False}),
    ("chunks", LLAMA, {"dp_replicate": 8, "policy": "selective", "sequence_chunk": 512}),
    ("delayed", LLAMA, {"dp_replicate": 8, "delayed": True}),
    ("host", NO_HOST, {"dp_shard": 8, "zero": 3, "parameters": "cpu"}),
    ("context_mixers", request_of("mamba-2.8b", global_batch=64), {"cp": 8, "zero": 3}),
    ("context_dropout", DROPPED, {"cp": 8, "zero": 3, "attention": "ring"}),
    ("context_dropout_groups", DROPPED, {"cp": 8, "zero": 3, "attention": "gather", "ulysses": 2}),
    ("context_grid", LLAMA, {"cp": 2, "tp": 4, "mode": "2d", "sequence_parallel": False}),
    ("context_experts", MOE, {"cp": 8, "ep": 8}),
    ("context_groups", LLAMA, {"dp_shard": 2, "cp": 4, "zero": 3, "ulysses": 8}),
    ("context_groups", LLAMA, {"cp": 8, "zero": 3, "ulysses": 8}),
    ("context_groups", LLAMA, {"cp": 8, "zero": 3, "ulysses": 2, "attention": "ulysses"}),
    ("context_heads", QWEN, {"cp": 8, "zero": 3, "attention": "ring", "ulysses": 4}),
    ("context_heads", QWEN, {"cp": 8, "zero": 3, "attention": "ulysses"}),
    ("replicated_weights", LLAMA, {"dp_replicate": 8, "parameters": "cpu", "optimizer": "cpu"}),
]


@pytest.mark.parametrize(("request_", "attention"), [(DROPPED, "gather"), (DROPPED, "ulysses"), (IN_STREAM, "ring")])
def test_dropout_beside_context_parallelism_is_legal(request_: Request, attention: str) -> None:
    assert check_plan(request_, columns_with({"cp": 8, "zero": 3, "attention": attention})) == []


@pytest.mark.parametrize(
    ("name", "request_", "plan"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_plan_that_breaks_one_rule_gets_that_reason_only(name: str, request_: Request, plan: dict[str, Any]) -> None:
    sentences = {rule.sentence: rule.name for rule in RULES}
    reasons = check_plan(request_, columns_with(plan))
    assert [sentences[sentence] for sentence, _ in reasons] == [name]
    assert all(hint for _, hint in reasons)


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 8, "microbatches": 4, "schedule": "naive"},  # further micro-batches repeat its bubble
        {"dp_replicate": 8, "schedule": "pipedream"},  # a name that nothing reads without a pipeline
    ],
)
def test_what_trains_is_planned(plan: dict[str, Any]) -> None:
    assert not check_plan(LLAMA, columns_with(plan))


def test_every_rule_is_broken_by_some_plan_above() -> None:
    assert {name for name, _, _ in BROKEN} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("request_", "plan"),
    [
        (LLAMA, {"dp_replicate": 8}),
        (LLAMA, {"dp_shard": 8, "zero": 3, "microbatches": 8}),
        (LLAMA, {"tp": 8, "microbatches": 64}),
        (LLAMA, {"tp": 8, "mode": "3d", "sequence_parallel": False}),
        (LLAMA, {"tp": 4, "dp_shard": 2, "zero": 2, "mode": "2d", "sequence_parallel": False}),
        (LLAMA, {"cp": 8, "zero": 3}),
        (LLAMA, {"pp": 8, "microbatches": 16, "schedule": "dualpipev", "virtual_stages": 2}),
        (MOE, {"dp_shard": 8, "ep": 8, "zero": 1}),
        (request_of(tiny_mixtral(num_local_experts=6), global_batch=64), {"dp_shard": 8, "zero": 1, "ep": 4}),
        (MOE, {"dp_shard": 2, "tp": 4, "ep": 8, "zero": 1}),
        (LLAMA, {"tp": 8, "partition": True, "policy": "full", "sequence_parallel": False}),
        (LLAMA, {"dp_shard": 8, "zero": 3, "offload_activations": "cpu", "policy": "budget", "mixture": [1, 9]}),
        (LLAMA, {"dp_shard": 8, "zero": 3, "optimizer": "nvme", "parameters": "cpu", "delayed": True}),
        (request_of("qwen2.5-7b", "4xH100-80GB", global_batch=4), {"tp": 4}),  # 28 heads, 4 key-value heads
    ],
)
def test_ordinary_plans_are_legal(request_: Request, plan: dict[str, Any]) -> None:
    assert check_plan(request_, columns_with(plan)) == []


def test_reasons_name_what_would_be_legal() -> None:
    batch = check_plan(request_of(global_batch=12), columns_with({"dp_replicate": 8}))
    assert batch[0][1] == "use a global batch of 8 or 16"
    small = check_plan(request_of(global_batch=4), columns_with({"dp_replicate": 8}))
    assert small[0][1] == "use a global batch of 8"
    heads = check_plan(QWEN, columns_with({"tp": 4, "dp_replicate": 2}))
    assert heads[0][1] == "tp may be 1, 2, 7, 14"
    stages = check_plan(MOE, columns_with({"pp": 8, "microbatches": 8}))
    assert stages[0][1] == "pp x virtual_stages may be at most 4"


@pytest.mark.parametrize(
    ("request_", "fixed", "words"),
    [
        (QWEN, {"mesh.tp": 4}, "tp may be 1, 2, 7, 14"),
        (LLAMA, {"mesh.pp": 3}, "multiply to 3, which does not divide 8 devices"),
        (request_of(global_batch=12), {"mesh.dp_shard": 8}, "does not divide over 8 ranks; 16 would"),
    ],
)
def test_a_wish_that_nothing_meets_gets_the_nearest_that_something_does(
    request_: Request, fixed: dict[str, Any], words: str
) -> None:
    assert words in nearest_legal(request_, fixed)


def test_a_schedule_that_the_rules_allow_can_be_generated() -> None:
    """The rules may be stricter than the schedules, never laxer: the engine would refuse what the planner offered."""
    shape = tiny_llama(num_hidden_layers=64)
    for schedule, pp, v, m in product(SCHEDULES, (2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 4, 6, 8, 16, 24)):
        request = request_of(shape, f"{pp}xH100-80GB", global_batch=m, sequence_length=64)
        columns = columns_with({"pp": pp, "schedule": schedule, "virtual_stages": v, "microbatches": m})
        if not check_plan(request, columns):
            reasons = check_request(schedule, num_ranks=pp, num_microbatches=m, virtual_stages=v)
            assert reasons == [], (schedule, pp, v, m)


def test_a_plan_counts_for_the_first_rule_it_breaks() -> None:
    columns = columns_with(
        {"dp_replicate": 8}, {"dp_replicate": 4, "microbatches": 3}, {"dp_replicate": 8, "microbatches": 3}
    )
    legal, refused = legal_rows(LLAMA, columns)
    assert legal.tolist() == [True, False, False]
    by_name = {rule.sentence: rule.name for rule in RULES}
    assert {by_name[sentence]: count for sentence, count in refused.items()} == {"ranks": 1, "batch": 1}


@given(request=requests(), data=st.data())
@settings(max_examples=20)
def test_a_legal_row_has_no_reason_against_it_and_an_illegal_one_has(request: Request, data: st.DataObject) -> None:
    candidates = enumerate_plans(request, Freedom())
    legal, refused = legal_rows(request, candidates)
    assert int((~legal).sum()) == sum(refused.values())
    if len(candidates):
        row = data.draw(st.integers(0, len(candidates) - 1))
        assert (check_plan(request, candidates.take([row])) == []) == bool(legal[row])


@given(request=requests(), data=st.data())
@settings(max_examples=20)
def test_a_legal_plan_makes_a_consistent_plan_file(request: Request, data: st.DataObject) -> None:
    columns = legal_plans(request)
    for row in np.unique(data.draw(st.lists(st.integers(0, max(len(columns) - 1, 0)), max_size=8))):
        if len(columns):
            assert check_consistent(plan_at(columns, int(row), precision={})) == []
