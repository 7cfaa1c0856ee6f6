"""The attention that a plan gets by default: of the three, the one whose exchanges cost the least time, by sizes.

With the bytes of a token's keys and values k, queries q and outputs o, and the seconds of its attention:

| attention | seconds per token                                                       |
| --------- | ----------------------------------------------------------------------- |
| gather    | 3 (cp - 1) k / bandwidth: nothing hides them; the work on parts of rows |
| ulysses   | 2 (cp - 1) / cp (q + k + o) / bandwidth                                 |
| ring      | those of gather that attention does not hide, and the work on its parts |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.core import axes
from weft.plan.columns import CP_ATTENTIONS, Columns, Floats, Ints
from weft.plan.cp.sizes import WORK, exchanged_kv_heads, kv_elements, work_of_parts
from weft.plan.request import Request, byte_sizes
from weft.plan.time.compute import ATTENTION_BACKWARD, attention_seconds
from weft.plan.time.links import axis_link
from weft.plan.time.transfers import OVERLAP

_KEY = "context_parallel.attention"


def chosen_attentions(request: Request, columns: Columns, fixed: Mapping[str, object]) -> Ints:
    """The fixed attention, or for each plan the fastest. No ring adds up what may have caps, as what writes
    its scores, or has dropout."""
    size, kinds = len(columns), [block for block in request.shape.kinds if block.attention is not None]
    if _KEY in fixed:
        return np.full(size, CP_ATTENTIONS.index(str(fixed[_KEY])), dtype=np.int64)
    if not kinds:
        return np.zeros(size, dtype=np.int64)
    found = [block.attention for block in kinds if block.attention is not None]
    largest, block = max(zip(found, kinds, strict=True), key=lambda each: each[0].num_heads)
    cp, token = columns.cp.astype(np.float64), np.ones(size)
    per_byte = byte_sizes(request).activation / axis_link(request.cluster, columns, (axes.CP,)).bytes_per_s
    gather = 3 * (cp - 1) * kv_elements(columns, largest) * per_byte
    heads = largest.num_heads / columns.tp + exchanged_kv_heads(columns, largest)
    by_heads = 2 * (cp - 1) / cp * heads * (largest.head_dim + largest.value_dim) * per_byte
    does_divide = np.all([each.num_heads % (columns.cp * columns.tp) == 0 for each in found], axis=0)
    work = (
        (1 + ATTENTION_BACKWARD) * attention_seconds(request, columns, block, token) / work_of_parts(columns, largest)
    )
    ring = np.maximum(gather - OVERLAP * WORK["ring"] * work * (cp - 1) / cp, 0.0) + (WORK["ring"] - 1) * work
    is_plain = not any(each.materialises_scores or each.dropout > 0 for each in found)
    seconds: dict[str, Floats] = {
        "gather": gather + (WORK["gather"] - 1) * work,
        "ulysses": np.where(does_divide, by_heads, np.inf),
        "ring": ring if is_plain else np.full(size, np.inf),
    }
    return np.argmin([seconds[name] for name in CP_ATTENTIONS], axis=0).astype(np.int64)
