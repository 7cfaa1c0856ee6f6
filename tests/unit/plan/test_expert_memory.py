"""Memory of expert parallelism: saved tensors of each dispatcher, rows that pass, and the instants of two units."""

from typing import Any

import pytest
from plan_cases import assert_terms_add_up, columns_with, one, request_of

from weft.core.experts import Routing
from weft.core.model_shape import BlockShape
from weft.core.terms import MemoryTerm as Term
from weft.plan.ep.memory import dispatched_tokens, pair_bytes, received_pairs, saved_by_dispatch, saved_extra
from weft.plan.ep.rows import forward_rows, rows_of
from weft.plan.memory.peak import MemoryEstimate, estimate_memory
from weft.plan.view import View, views_of

TOKENS = 4096
EVEN = Routing(tokens=TOKENS, top_k=2, num_experts=8, ep=4, rank=0)
MIXTRAL = request_of("mixtral-8x7b", global_batch=8, sequence_length=TOKENS)
HIDDEN, WIDTH = 4096, 14336


def view_of(**plan: Any) -> View:
    return views_of(MIXTRAL, columns_with({"dp_shard": 8, "ep": 4, "zero": 3, "dispatcher": "tokens", **plan}))[0]


def block_of(view: View) -> BlockShape:
    return view.shape.kinds[0]


def memory(**plan: Any) -> MemoryEstimate:
    given = {"dp_shard": 8, "ep": 4, "zero": 3, "dispatcher": "tokens", "policy": "full", **plan}
    return estimate_memory(views_of(MIXTRAL, columns_with(given)))


def test_dispatchers_save_indices_and_no_rows() -> None:
    pairs = 2 * TOKENS
    rows = sum(EVEN.expected()["rows_sent"])
    found = {kind: saved_by_dispatch(kind, EVEN, weight=4) for kind in ("pairs", "tokens", "gather")}
    assert found == {
        "pairs": pairs * (16 + 4 + 16 - 28),
        "tokens": 8 * TOKENS * 4 + 8 * rows + (8 + 4) * 2 * rows + pairs * (8 - 28),
        "gather": (8 + 4) * 4 * pairs + pairs * (8 - 28),
    }
    assert max(found.values()) < pairs * HIDDEN * 2 / 100


def test_experts_save_the_pairs_that_a_rank_receives() -> None:
    uneven = Routing(tokens=TOKENS, top_k=2, num_experts=7, ep=2, rank=0)
    assert received_pairs(EVEN) == 2 * TOKENS
    assert received_pairs(uneven) == pytest.approx(2 * TOKENS * 4 / 3.5, rel=1e-3)
    view = view_of()
    assert one(pair_bytes(block_of(view), view)) == 2 * (2 * HIDDEN + 2 * 2 * WIDTH)


def test_no_expert_parallelism_saves_nothing_more() -> None:
    view = view_of(ep=1)
    assert one(saved_extra(view, block_of(view))) == 0


def test_folded_tensor_ranks_share_tokens_and_their_orders() -> None:
    alone, folded = (view_of(dispatcher="gather", **plan) for plan in ({}, {"dp_shard": 4, "tp": 2}))
    block = block_of(alone)
    tokens, shared = one(dispatched_tokens(alone, block)), one(dispatched_tokens(folded, block))
    assert (tokens, shared) == (TOKENS, TOKENS)  # twice the rows on half the dp ranks, halved by tp
    not_repeated = TOKENS * 2 * (3 * 8 + 4)
    assert one(saved_extra(folded, block)) == one(saved_extra(alone, block)) - not_repeated


def test_rows_that_pass_through_a_dispatcher() -> None:
    rows = sum(EVEN.expected()["rows_sent"])
    found = {kind: forward_rows(kind, EVEN) for kind in ("pairs", "tokens", "gather")}
    assert found == {"pairs": 2 * 2 * TOKENS, "tokens": 2 * rows, "gather": (4 + 1) * TOKENS}


def test_experts_that_tensor_ranks_shard_have_a_share_of_the_width() -> None:
    full, sharded = view_of(), view_of(tp=2, dp_shard=4, tensor="width")
    pairs = 2 * TOKENS
    assert one(rows_of(full).backward) == pairs * 2 * (2 * WIDTH - HIDDEN)
    assert one(rows_of(sharded).backward) == 2 * pairs * 2 * (2 * WIDTH / 2 - HIDDEN)


def test_a_block_and_its_experts_are_gathered_apart() -> None:
    """ZeRO-3 holds the root, one block and its experts; without expert parallelism the next block too."""
    found = memory()
    share = view_of().share
    assert "experts" in found.instant[int(one(found.at))]
    gathered = one(found.terms[Term.GATHERED])
    assert gathered <= one(share.root.padded + share.largest_padded) * 2 + 1
    without = memory(ep=1)
    assert "experts" not in without.instant[int(one(without.at))]


@pytest.mark.parametrize("dispatcher", ["pairs", "tokens", "gather"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_terms_add_up_and_more_ranks_of_experts_need_less(zero: int, dispatcher: str) -> None:
    found = [memory(zero=zero, ep=ep, dispatcher=dispatcher) for ep in (2, 4, 8)]
    for estimate in found:
        assert_terms_add_up(estimate.terms, estimate.total)
    totals = [one(estimate.total) for estimate in found]
    if dispatcher != "gather" and zero < 3:  # gather holds the rows of all ranks; ZeRO-3 shards experts over the others
        assert totals == sorted(totals, reverse=True)
