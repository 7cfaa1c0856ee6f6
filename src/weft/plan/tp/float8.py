"""Float8 scales over tensor-parallel ranks: all-reduces of largest magnitudes, and the sizes that blocks allow.

The ranks of a layer divide its outputs N ("column") or its inputs K ("row"), M rows of activations each:

| recipe     | column                                 | row                              |
| ---------- | -------------------------------------- | -------------------------------- |
| tensorwise | single numbers, which are not counted  | the same                         |
| delayed    | none: amax of all layers, once a step  | the same                         |
| rowwise    | backward: M for gradients, K for weights | forward: M for rows, N for weights |
| blocks     | none: every block is on one rank       | none                             |

Scales of weights gathered in float8 are reduced together, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core.float8 import BLOCKS
from weft.core.float8_section import RECIPES
from weft.core.model_shape import LinearShape
from weft.plan.axis import SMALL_ELEMENTS, sharding_ranks
from weft.plan.columns import FLOAT8, TP_MODES, Bools, Columns, Floats
from weft.plan.request import Request
from weft.plan.time.float8 import multiplies_in_float8
from weft.plan.time.links import reduce_bytes
from weft.plan.view import View

FLOAT32_BYTES = 4.0
Sent = tuple[str, str, Floats, Floats]


def scale_collectives(view: View) -> Iterator[Sent]:
    """(collective, phase, bytes, count) per step."""
    columns = view.columns
    if not np.any(columns.float8_linears):
        return
    gathered = view.num_in_float8 * (columns.shards > 1)  # all together, once per step
    gathered = gathered * (gathered > SMALL_ELEMENTS)
    nbytes = reduce_bytes(gathered * FLOAT32_BYTES, columns.tp.astype(np.float64))
    yield "all_reduce", "forward", nbytes, (gathered > 0).astype(np.float64)
    for index, block in enumerate(view.shape.kinds):
        times = view.stage.blocks[:, index] * columns.microbatches
        again = view.stage.recomputed.full[:, index] * columns.microbatches
        for linear in block.linears:
            if linear.style not in ("column", "row"):
                continue
            taken = _taken(columns, linear) * linear.copies
            for is_backward in (False, True):
                numbers, count = _reduced(linear, columns, view.tokens, is_backward=is_backward)
                nbytes = reduce_bytes(numbers * FLOAT32_BYTES, columns.tp.astype(np.float64)) * taken
                count = count * taken
                yield "all_reduce", "backward" if is_backward else "forward", nbytes * times, count * times
                if not is_backward:
                    yield "all_reduce", "backward", nbytes * again, count * again


def _taken(columns: Columns, linear: LinearShape) -> Bools:
    by_choice = np.asarray([multiplies_in_float8(linear, choice) for choice in FLOAT8])
    return np.asarray(by_choice[columns.float8_linears])


def _reduced(linear: LinearShape, columns: Columns, tokens: Floats, *, is_backward: bool) -> tuple[Floats, Floats]:
    """Numbers and collectives of one linear, forward or backward, that are counted."""
    is_row = linear.style == "row"
    has_rows = (columns.float8_recipe == RECIPES.index("rowwise")) & (is_row != is_backward)
    features = linear.out_features if is_row else linear.in_features
    return (tokens + features) * has_rows, 2.0 * has_rows


def blocks_are_cut(request: Request, columns: Columns) -> Bools:
    """Plans in which ranks would share a block of one scale."""
    broken = np.zeros(len(columns), dtype=bool)
    sizes = np.asarray([BLOCKS.get(recipe, 1) for recipe in RECIPES])[columns.float8_recipe]
    is_line = (columns.tp > 1) & (columns.tp_mode == TP_MODES.index("1d"))
    for block in request.shape.kinds:
        for linear in block.linears:
            if linear.style in ("column", "row"):
                features = linear.in_features if linear.style == "row" else linear.out_features
                broken |= _taken(columns, linear) & is_line & (features // sharding_ranks(columns) % sizes != 0)
    return broken
