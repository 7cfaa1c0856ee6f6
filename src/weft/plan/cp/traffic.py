"""Traffic of context parallelism, per call of attention in a block and micro-batch, as the engine's attentions make it.

With the rank's keys and values k (of a tensor-parallel rank's heads), its queries q, and outputs o; n of the ranks
exchange heads (all with ulysses), and keys travel between c = cp / n:

| attention | forward                                | backward                                                  |
| --------- | -------------------------------------- | --------------------------------------------------------- |
| n > 1     | all_to_all of q, k twice, o            | all_to_all of their gradients; recompute repeats those of |
|           |                                        | the forward                                               |
| gather    | all_gather of k twice (keys, values)   | all_gather of k twice again; reduce_scatter of gradients  |
| ring      | c - 1 sends of k (keys with values)    | the same again, and of their gradients; recompute repeats |
|           |                                        | those of the forward                                      |
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core import axes
from weft.core.model_shape import AttentionShape
from weft.plan.axis import TrafficRow
from weft.plan.columns import CP_ATTENTIONS, Bools, Columns, Floats
from weft.plan.cp.sizes import kv_elements
from weft.plan.view import View

Passed = tuple[str, str, Floats, Floats]  # collective, phase, bytes on the wire, count: of one block and micro-batch


def traffic(view: View) -> list[TrafficRow]:
    columns, size = view.columns, len(view.columns)
    if not np.any(columns.cp > 1):
        return []
    totals: dict[tuple[str, str], list[Floats]] = {}
    m, recomputed = columns.microbatches.astype(np.float64), view.stage.recomputed
    for index, block in enumerate(view.shape.kinds):
        if block.attention is None:
            continue
        calls = block.attention.calls * m
        times = view.stage.blocks[:, index] * calls
        repeats = (recomputed.full + recomputed.selective)[:, index] * calls
        rank_bytes = view.tokens * view.sizes.activation
        for is_on, passes in (
            (columns.head_ranks > 1, _heads(columns, block.attention, rank_bytes, times, repeats)),
            (_has(columns, "gather"), _gather(columns, block.attention, rank_bytes, times)),
            (_has(columns, "ring"), _ring(columns, block.attention, rank_bytes, times, repeats)),
        ):
            for collective, phase, nbytes, count in passes:
                total = totals.setdefault((collective, phase), [np.zeros(size), np.zeros(size)])
                total[0] = total[0] + np.where(is_on, nbytes, 0.0)
                total[1] = total[1] + np.where(is_on, count, 0.0)
    return [TrafficRow(axes.CP, collective, phase, *both) for (collective, phase), both in totals.items()]


def _has(columns: Columns, attention: str) -> Bools:
    return np.asarray((columns.key_ranks > 1) & (columns.cp_attention == CP_ATTENTIONS.index(attention)))


def _gather(columns: Columns, attention: AttentionShape, rank_bytes: Floats, times: Floats) -> Iterator[Passed]:
    sent = (columns.key_ranks - 1) * rank_bytes * kv_elements(columns, attention) * times
    yield "all_gather", "forward", sent, 2 * times
    yield "all_gather", "backward", sent, 2 * times
    yield "reduce_scatter", "backward", sent, 2 * times


def _heads(
    columns: Columns, attention: AttentionShape, rank_bytes: Floats, times: Floats, repeats: Floats
) -> Iterator[Passed]:
    queries = attention.num_heads / columns.tp * (attention.head_dim + attention.value_dim)
    elements = queries + kv_elements(columns, attention)
    sent = (columns.head_ranks - 1) / columns.head_ranks * rank_bytes * elements
    yield "all_to_all", "forward", sent * times, 4 * times
    yield "all_to_all", "backward", sent * (times + repeats), 4 * (times + repeats)


def _ring(
    columns: Columns, attention: AttentionShape, rank_bytes: Floats, times: Floats, repeats: Floats
) -> Iterator[Passed]:
    hops = np.asarray(columns.key_ranks - 1, dtype=np.float64)
    sent = hops * rank_bytes * kv_elements(columns, attention)
    yield "send", "forward", sent * times, hops * times
    yield "send", "backward", sent * (2 * times + repeats), hops * (2 * times + repeats)
