"""Rows of hidden states that dispatchers and experts hold beyond what they save, per block and micro-batch.

With t tokens, K experts per token, r rows sent and s received, p pairs received, n ranks, in rows of hidden states:

| dispatcher | forward                                                            | gradient |
| ---------- | ------------------------------------------------------------------ | -------- |
| pairs      | outputs of experts in two orders, 2 p; before, t K sent + p        |          |
| tokens     | r sent and s received; later s sums and r returned                 |          |
| gather     | rows of all ranks, n t, or their sums; and the own sums, t         | n t      |

In float8 the rows that travel to experts are about half as large; `gather` holds those of all ranks in both formats.
`gradient`: of rows that exist before a recomputed forward begins.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from weft.core.experts import WIRE_FORMATS, Routing, float8_bytes
from weft.core.model_shape import BlockShape
from weft.plan.columns import Floats
from weft.plan.ep.memory import pair_bytes, per_layer, received_pairs
from weft.plan.view import View


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Bytes of the block with the most."""

    forward: Floats
    gradient: Floats
    backward: Floats  # gradients of the gate's operands, less the saved tensors that are freed by then
    saved: Floats  # inside experts

    def largest(self, other: Rows) -> Rows:
        return Rows(**{one.name: np.maximum(getattr(self, one.name), getattr(other, one.name)) for one in fields(Rows)})


def rows_of(view: View) -> Rows:
    none = np.zeros(len(view.columns))
    found = Rows(forward=none, gradient=none, backward=none, saved=none)
    for block in view.shape.kinds:
        found = found.largest(_rows_of_block(view, block)) if block.moe is not None else found
    return found


def _rows_of_block(view: View, block: BlockShape) -> Rows:
    h, c = view.shape.hidden_size, view.sizes.activation
    pairs = per_layer(view, block, lambda _, routing: received_pairs(routing))
    width = block.moe.expert_width / view.columns.expert_tp if block.moe is not None else 0.0
    return Rows(
        forward=np.maximum(per_layer(view, block, forward_rows) * h * c, _unpacked_bytes(view, block)),
        gradient=per_layer(view, block, _gradient_rows) * h * c,
        backward=pairs * c * (2 * width - h),
        saved=pairs * pair_bytes(block, view),
    )


def forward_rows(dispatcher: str, routing: Routing) -> int:
    """Rows that exist at most, beside saved ones."""
    if dispatcher == "gather":
        return (routing.ep + 1) * routing.tokens
    if dispatcher == "pairs":
        pairs = received_pairs(routing)
        return pairs + max(pairs, routing.tokens * routing.top_k)
    counts = routing.expected()
    return sum(counts["rows_received"]) + sum(counts["rows_sent"])


def _unpacked_bytes(view: View, block: BlockShape) -> Floats:
    """Bytes of rows while those that arrived in float8 are unpacked."""
    h, c = view.shape.hidden_size, view.sizes.activation
    received = per_layer(view, block, _received_rows)
    return np.where(view.columns.wire == WIRE_FORMATS.index("float8"), received * (float8_bytes(h) + h * c), 0.0)


def _received_rows(dispatcher: str, routing: Routing) -> int:
    if dispatcher == "gather":
        return routing.ep * routing.tokens
    return received_pairs(routing) if dispatcher == "pairs" else sum(routing.expected()["rows_received"])


def _gradient_rows(dispatcher: str, routing: Routing) -> int:
    return routing.ep * routing.tokens if dispatcher == "gather" else 0
