"""Rows of hidden states that dispatchers and experts hold beyond what they save, per block and micro-batch.

With t tokens, K experts per token, r rows sent and s received, p pairs received, n ranks, hidden size h, c bytes of an
activation, and v of a weighted output (4 with float32 weights):

| dispatcher | forward: the largest of                                                                  | gradient |
| ---------- | ---------------------------------------------------------------------------------------- | -------- |
| all        | inside experts: p h (c + 2 v): input, weighted outputs in two orders                      |          |
| pairs      | weighted outputs and their sum, (K + 1) t h v                                             |          |
| tokens     | outputs p h c, sums s h 4, and p h 4 or s h c; the same of r rows, summed for t           |          |
| gather     | outputs p h c, sums n t h 4, and p h 4 or n t h c                                         | n t h c  |

`gradient`: of rows that exist before a recomputed forward begins. Outputs in float32 are not cast: no second p h 4.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from weft.core.experts import Routing
from weft.core.model_shape import BlockShape
from weft.plan.columns import Floats
from weft.plan.ep.memory import pair_bytes, per_layer, received_pairs, weight_bytes
from weft.plan.view import View

WIDE_BYTES = 4  # sums are in float32


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
    weighted = max(c, weight_bytes(block.moe, view)) if block.moe is not None else c
    pairs = per_layer(view, block, lambda _, routing: received_pairs(routing))
    width = block.moe.expert_width / view.columns.expert_tp if block.moe is not None else 0.0
    return Rows(
        forward=per_layer(view, block, lambda kind, routing: forward_rows(kind, routing, c=c, v=weighted)) * h,
        gradient=per_layer(view, block, _gradient_rows) * h * c,
        backward=pairs * c * (2 * width - h),
        saved=pairs * pair_bytes(block, view),
    )


def forward_rows(dispatcher: str, routing: Routing, *, c: int, v: int) -> float:
    """Bytes per element of the hidden size that exist at most, beside saved ones."""
    pairs = received_pairs(routing)
    inside = pairs * (c + 2 * v)
    if dispatcher == "pairs":
        return float(max(inside, routing.tokens * (routing.top_k + 1) * v))
    if dispatcher == "gather":
        return float(max(inside, _summed(pairs, routing.ep * routing.tokens, c)))
    counts = routing.expected()
    there, back = sum(counts["rows_received"]), sum(counts["rows_sent"])
    return float(max(inside, _summed(pairs, there, c), _summed(back, routing.tokens, c)))


def _summed(values: int, sums: int, c: int) -> int:
    """Values in the compute dtype, their sums in float32, and values cast to float32 or sums cast back."""
    cast = 0 if c == WIDE_BYTES else max(values * WIDE_BYTES, sums * c)
    return values * c + sums * WIDE_BYTES + cast


def _gradient_rows(dispatcher: str, routing: Routing) -> int:
    return routing.ep * routing.tokens if dispatcher == "gather" else 0
