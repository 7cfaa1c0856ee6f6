"""Saved activations of expert parallelism per block and micro-batch, beyond those of the same block without it.

With t tokens that a rank dispatches, K experts per token, n ranks, r rows that it sends, s that it receives, p pairs
that it receives and w bytes of a routing weight (`core.experts: Routing.expected`, with an even router):

| dispatcher | saves                                                                                     |
| ---------- | ----------------------------------------------------------------------------------------- |
| pairs      | order both ways and weight of its pairs, (16 + w) t K; order both ways at experts, 16 p   |
| tokens     | rows of its tokens, 8 t n; slots of sent rows, 8 r                                        |
|            | at experts: pairs of received rows and their weights, (8 + w) s K; slots of pairs, 8 p    |
| gather     | pairs of all rows and their weights, (8 + w) n t K; slots of pairs, 8 p                   |
| all        | less: the order of pairs inside experts, which are sorted already, (24 + w) p             |

Rows that travel are not saved: derivatives of indexing and of sums need indices alone. Outputs of experts are saved
once, where the weights are applied. The tensors inside experts are those of p pairs instead of t K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.core.experts import Routing
from weft.core.model_shape import BlockShape, MoeShape
from weft.plan.columns import DISPATCHERS, Floats
from weft.plan.ep.choice import chosen_dispatchers
from weft.plan.view import View

FLOAT32_BYTES = 4
INDEX_BYTES = 8
ORDERS = 3  # of a pair inside experts: its row, the place of its weight, the way back


def dispatched_tokens(view: View, block: BlockShape) -> Floats:
    """Tokens that a rank dispatches per micro-batch: all that enter its experts.

    Experts that are sharded over tensor ranks have gathered the slices of the sequence; other experts have not.
    """
    columns = view.columns
    has_slice = (columns.sequence_parallel > 0) & (not block.shards("expert"))
    shares = np.where(columns.folds_experts | has_slice, columns.tp, 1)
    return np.asarray(np.ceil(view.tokens / shares), dtype=np.float64)


def weight_bytes(moe: MoeShape, view: View) -> int:
    """Bytes of one routing weight."""
    return FLOAT32_BYTES if moe.weighs_in_float32 else view.sizes.activation


def per_layer(view: View, block: BlockShape, formula: Callable[[str, Routing], float]) -> Floats:
    """`formula(dispatcher, routing)` for every plan; 0 without expert parallelism. Few layers are distinct."""
    columns, found = view.columns, np.zeros(len(view.columns))
    dispatched = np.flatnonzero(columns.ep > 1)
    if block.moe is None or not len(dispatched):
        return found
    chosen = chosen_dispatchers(view.shape, columns.ep, columns.dispatcher)
    facts = np.stack([columns.ep, chosen, dispatched_tokens(view, block)], axis=1)[dispatched]
    keys, place = np.unique(facts, axis=0, return_inverse=True)
    for number, (ep, dispatcher, tokens) in enumerate(keys):
        if ep > block.moe.num_experts:  # refused by a rule
            continue
        routing = Routing(
            tokens=int(tokens), top_k=block.moe.top_k, num_experts=block.moe.num_experts, ep=int(ep), rank=0
        )
        found[dispatched[place.reshape(-1) == number]] = formula(DISPATCHERS[int(dispatcher)], routing)
    return found


def received_pairs(routing: Routing) -> int:
    return sum(routing.expected()["pairs_received"])


def saved_by_dispatch(dispatcher: str, routing: Routing, *, weight: int) -> float:
    """Bytes that a dispatcher saves, less those that experts then do not save."""
    received, own = received_pairs(routing), routing.tokens * routing.top_k
    not_sorted_again = (ORDERS * INDEX_BYTES + weight) * received
    if dispatcher == "pairs":
        return float((2 * INDEX_BYTES + weight) * own + 2 * INDEX_BYTES * received - not_sorted_again)
    slots = INDEX_BYTES * received - not_sorted_again
    if dispatcher == "gather":
        return float((INDEX_BYTES + weight) * routing.ep * own + slots)
    counts = routing.expected()
    there, back = sum(counts["rows_received"]), sum(counts["rows_sent"])
    at_home = INDEX_BYTES * (routing.tokens * routing.ep + back)
    return float(at_home + (INDEX_BYTES + weight) * there * routing.top_k + slots)


def saved_extra(view: View, block: BlockShape) -> Floats:
    """Saved bytes of one block beyond those without expert parallelism."""
    moe = block.moe
    if moe is None:
        return np.zeros(len(view.columns))
    weight = weight_bytes(moe, view)
    saved = per_layer(view, block, lambda kind, routing: saved_by_dispatch(kind, routing, weight=weight))
    more = per_layer(view, block, lambda _, routing: received_pairs(routing) - routing.tokens * routing.top_k)
    # tensor ranks that share tokens do not repeat the orders of pairs
    repeated = np.where(view.columns.folds_experts, view.tokens - dispatched_tokens(view, block), 0.0)
    orders = ORDERS * INDEX_BYTES + weight
    return saved + more * pair_bytes(block, view) - repeated * moe.top_k * orders


def pair_bytes(block: BlockShape, view: View) -> Floats:
    """Saved bytes per pair inside experts: input and output, and about twice the outputs of the first matrices."""
    moe, c = block.moe, view.sizes.activation
    if moe is None:
        return np.zeros(len(view.columns))
    wide = sum(
        linear.out_features
        for linear in block.linears
        if linear.role == "expert" and linear.in_features != moe.expert_width
    )
    return np.asarray(c * (2 * view.shape.hidden_size + 2 * wide / view.columns.expert_tp), dtype=np.float64)
