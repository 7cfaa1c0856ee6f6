"""The attention of context parallelism that a plan gets by default: by the time of its exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_cases import columns_with, one, request_of, view_with

from weft.core.model_shape import ModelShape
from weft.core.terms import StepTerm as Term
from weft.plan.columns import CP_ATTENTIONS
from weft.plan.cp.choice import with_attentions
from weft.plan.cp.sizes import attention_buffers
from weft.plan.request import Request
from weft.plan.time.compute import attention_seconds
from weft.plan.time.step_time import estimate_time

LONG = request_of("llama-3-8b", "64xH100-80GB", global_batch=16, sequence_length=131_072)
ACROSS: dict[str, Any] = {"cp": 8, "tp": 8, "zero": 3, "dp_shard": 1}  # each context-parallel rank on a node of its own


def chosen(request: Request, fixed: dict[str, object], **keys: Any) -> str:
    found = with_attentions(request, columns_with(keys), fixed)
    size = int(found.cp_ulysses[0])
    return CP_ATTENTIONS[int(found.cp_attention[0])] + (f" of {size}" if size > 1 else "")


def with_attention(shape: ModelShape, **changes: Any) -> ModelShape:
    kinds = tuple(
        replace(kind, attention=replace(kind.attention, **changes)) if kind.attention else kind for kind in shape.kinds
    )
    return replace(shape, kinds=kinds)


@pytest.mark.parametrize(
    ("keys", "attention"),
    [({"cp": 2}, "ulysses"), ({"cp": 8}, "ulysses"), (ACROSS, "gather")],
)
def test_the_default_has_the_cheapest_exchanges(keys: dict[str, Any], attention: str) -> None:
    assert chosen(LONG, {}, **keys) == attention
    assert chosen(LONG, {"context_parallel.attention": "gather"}, **keys) == "gather"


SLOW = replace(LONG, cluster=replace(LONG.cluster, between=replace(LONG.cluster.between, bytes_per_s=5e9)))


def test_a_slow_network_gets_a_ring() -> None:
    assert chosen(SLOW, {}, **ACROSS) == "ring"


@pytest.mark.parametrize("changes", [{"materialises_scores": True}, {"dropout": 0.1}])
def test_attention_that_writes_its_scores_or_drops_gets_no_ring(changes: dict[str, Any]) -> None:
    assert chosen(replace(SLOW, shape=with_attention(SLOW.shape, **changes)), {}, **ACROSS) != "ring"


@pytest.mark.parametrize("attention", ["gather", "ulysses"])
def test_dropout_costs_the_attention_of_all_ranks(attention: str) -> None:
    dropped = replace(LONG, shape=with_attention(LONG.shape, dropout=0.1))
    block, tokens = LONG.shape.kinds[0], np.ones(1)
    assert chosen(dropped, {}, cp=64) == "gather"
    for degree, times in ((1, 1), (8, 8)):
        columns = columns_with({"cp": degree, "attention": attention})
        plain = attention_seconds(LONG, columns, block, tokens)
        assert one(attention_seconds(dropped, columns, dropped.shape.kinds[0], tokens)) == times * one(plain)


@pytest.mark.parametrize(("bytes_per_s", "attention"), [(None, "gather of 8"), (5e9, "ring of 8")])
def test_more_ranks_than_heads_exchange_them_within_a_node(bytes_per_s: float | None, attention: str) -> None:
    """32 heads, 64 ranks on 8 nodes."""
    between = LONG.cluster.between
    network = replace(between, bytes_per_s=bytes_per_s or between.bytes_per_s)
    request = replace(LONG, cluster=replace(LONG.cluster, between=network))
    assert chosen(request, {}, cp=64) == attention
    assert chosen(request, {"context_parallel.attention": "ring"}, cp=64) == "ring"
    assert "of" not in chosen(request, {"context_parallel.ulysses": 1}, cp=64)
    assert chosen(request, {"context_parallel.ulysses": 4}, cp=64, ulysses=4) in ("gather of 4", "ring of 4")


def test_groups_stay_on_a_node_and_divide_the_heads() -> None:
    assert chosen(LONG, {}, cp=16, tp=4) == "gather of 2"  # two ranks of four tensor ranks each
    assert chosen(LONG, {}, cp=8, tp=8) == "gather"
    few = request_of("qwen2.5-0.5b", "64xH100-80GB", global_batch=16, sequence_length=131_072)
    assert chosen(few, {}, cp=64) == "gather of 2"  # 14 heads


def test_groups_leave_less_for_the_network() -> None:
    exposed = {
        size: one(estimate_time([view_with(SLOW, attention="gather", cp=64, zero=3, ulysses=size)]).terms[Term.CP_COMM])
        for size in (1, 8)
    }
    assert exposed[8] < exposed[1]


def test_a_ring_alone_hides_its_exchanges() -> None:
    exposed = {
        attention: one(estimate_time([view_with(LONG, attention=attention, **ACROSS)]).terms[Term.CP_COMM])
        for attention in CP_ATTENTIONS
    }
    assert exposed["ring"] < 0.2 * exposed["gather"]


def test_groups_hold_a_share_of_the_heads_at_the_positions_of_all() -> None:
    """8 key-value heads over 4 neighbours: each gathers 2 of them, from 2 ranks with 4 times the positions."""
    keys: dict[str, Any] = {"cp": 8, "zero": 3, "attention": "gather"}
    alone, groups = (view_with(LONG, **keys, ulysses=size) for size in (1, 4))
    gathered = one(attention_buffers(groups, wide=np.zeros(1)))
    assert gathered == one(attention_buffers(alone, wide=np.zeros(1))) / 4
    assert one(attention_buffers(groups, wide=np.full(1, np.inf))) == one(2 * groups.stream_bytes)


def test_a_ring_holds_keys_and_values_of_two_ranks() -> None:
    wide = {"cp": 8, "zero": 3}
    nothing = np.zeros(1)
    views = [view_with(LONG, attention=name, **wide) for name in ("gather", "ring")]
    gather, ring = (one(attention_buffers(view, wide=nothing)) for view in views)
    own = 131_072 / 8 * 16 * 8 * (128 + 128) * 2  # rows of a rank, 8 heads, bf16
    assert gather == 2 * 4 * 8 * own
    assert one(attention_buffers(views[1], wide=nothing + 5 * own)) == ring - 5 * own
    assert ring == (4 + 2 * 2 + 4 * 3 + 2 * 2) * own  # queries have four times a key's heads, and half of k with v
