"""Traffic of expert parallelism per block and micro-batch, as the engine's dispatchers make it.

With t tokens per rank, hidden size h, K experts per token, r rows (`core.experts`), n ranks, and a balanced router:

| dispatcher | forward                                              | backward                                        |
| ---------- | ---------------------------------------------------- | ----------------------------------------------- |
| pairs      | all_to_all of counts [n, E/n], [t K, h] twice        | all_to_all of [t K, h] twice                    |
| tokens     | all_to_all of counts [n, 2], [r, h] twice, [r, 2K]   | all_to_all of [r, h] twice, [r, K]              |
| gather     | all_gather of [t, h], [t, K] twice; reduce_scatter   | all_gather of [t, h]; reduce_scatter, [t, K] too |

Hidden states on their way to experts may be in float8 (`expert_parallel.wire`), in the forward alone. With
`expert_parallel.chunks` every collective is that many smaller ones; the counts are exchanged as often.
Recompute, full or selective, repeats those of the forward in the backward; the last reduce-scatter only if a tensor is
saved after it. Counts of at most 8 numbers are small, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core import axes
from weft.core.experts import WIRE_FORMATS, WireFormat, float8_bytes, ranks_reached
from weft.core.model_shape import BlockShape, MoeShape
from weft.plan.axis import SMALL_ELEMENTS, TrafficRow
from weft.plan.columns import DISPATCHERS, Floats
from weft.plan.ep.choice import chosen_dispatchers
from weft.plan.ep.memory import FLOAT32_BYTES, INDEX_BYTES, dispatched_tokens, weight_bytes
from weft.plan.time.links import gather_bytes
from weft.plan.view import View

Passed = tuple[str, float, float]  # collective, bytes of the full tensor, count


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts of one block, on `ep` ranks."""

    moe: MoeShape
    ep: int
    tokens: float  # per rank and micro-batch
    row_bytes: float  # of one token's hidden states
    wire_bytes: float  # of the same on their way to experts
    weight_bytes: float  # of one routing weight
    saves_after: bool  # a tensor after the experts' output
    chunks: int

    def forward(self, dispatcher: str, *, is_repeated: bool = False) -> Iterator[Passed]:
        if dispatcher == "gather":
            full = self.ep * self.tokens
            yield "all_gather", full * (self.wire_bytes + self.moe.top_k * (self.weight_bytes + INDEX_BYTES)), 3
            # a recomputed forward ends with the last saved tensor, which is one of the last chunk's experts
            share = 1 if self.saves_after or not is_repeated else 1 - 1 / self.chunks
            yield "reduce_scatter", full * self.row_bytes * share, share
            return
        most = -(-self.moe.num_experts // self.ep)
        counts = self.ep * (most if dispatcher == "pairs" else 2)
        is_counted = counts > SMALL_ELEMENTS
        yield "all_to_all", counts * INDEX_BYTES * self.chunks * is_counted, is_counted
        rows = self.rows(dispatcher)
        yield "all_to_all", rows * (self.wire_bytes + self.row_bytes), 2
        if dispatcher == "tokens":
            yield "all_to_all", rows * 2 * self.moe.top_k * FLOAT32_BYTES, 1

    def backward(self, dispatcher: str) -> Iterator[Passed]:
        if dispatcher == "gather":
            full = self.ep * self.tokens
            yield "all_gather", full * self.row_bytes, 1
            yield "reduce_scatter", full * (self.row_bytes + self.moe.top_k * self.weight_bytes), 2
            return
        rows = self.rows(dispatcher)
        yield "all_to_all", 2 * rows * self.row_bytes, 2
        if dispatcher == "tokens":
            yield "all_to_all", rows * self.moe.top_k * self.weight_bytes, 1

    def rows(self, dispatcher: str) -> float:
        """Rows of hidden states that a rank sends, with those for itself."""
        if dispatcher == "pairs":
            return self.tokens * self.moe.top_k
        return self.tokens * sum(ranks_reached(num_experts=self.moe.num_experts, top_k=self.moe.top_k, ep=self.ep))


def traffic(view: View) -> list[TrafficRow]:
    columns, size = view.columns, len(view.columns)
    totals: dict[tuple[str, str], tuple[Floats, Floats]] = {}
    dispatched = np.flatnonzero(columns.ep > 1)
    if not len(dispatched):
        return []
    chosen = chosen_dispatchers(view.shape, columns.ep, columns.dispatcher)
    for index, block in enumerate(view.shape.kinds):
        if block.moe is None:
            continue
        # few distinct layers: formulas per layer, then columns
        tokens = dispatched_tokens(view, block)
        facts = np.stack([columns.ep, chosen, columns.wire, columns.expert_chunks, tokens], axis=1)[dispatched]
        keys, place = np.unique(facts, axis=0, return_inverse=True)
        for number, (ep, dispatcher, wire, chunks, per_rank) in enumerate(keys):
            rows = dispatched[place.reshape(-1) == number]
            format_ = WIRE_FORMATS[int(wire)]
            layer = _layer(view, block, ep=int(ep), tokens=float(per_rank), wire=format_, chunks=int(chunks))
            if layer is None:
                continue
            for phase, (collective, full_bytes, count), times in _passes(
                view, index, layer, DISPATCHERS[int(dispatcher)]
            ):
                nbytes, total = totals.setdefault((collective, phase), (np.zeros(size), np.zeros(size)))
                nbytes[rows] += float(gather_bytes(np.asarray(full_bytes), np.asarray(ep))) * times[rows]
                total[rows] += count * layer.chunks * times[rows]
    return [TrafficRow(axes.EP, collective, phase, *both) for (collective, phase), both in totals.items()]


def _passes(view: View, index: int, layer: Layer, dispatcher: str) -> Iterator[tuple[str, Passed, Floats]]:
    """(phase, collective, how often per step) of the blocks of one kind."""
    m = view.columns.microbatches.astype(np.float64)
    recomputed = view.stage.recomputed
    times, repeats = view.stage.blocks[:, index] * m, (recomputed.full + recomputed.selective)[:, index] * m
    for passed in layer.forward(dispatcher):
        yield "forward", passed, times
    for passed in layer.backward(dispatcher):
        yield "backward", passed, times
    for passed in layer.forward(dispatcher, is_repeated=True):
        yield "backward", passed, repeats


def _layer(view: View, block: BlockShape, *, ep: int, tokens: float, wire: WireFormat, chunks: int) -> Layer | None:
    moe = block.moe
    if moe is None or ep > moe.num_experts:  # refused by a rule
        return None
    row_bytes = view.shape.hidden_size * view.sizes.activation
    return Layer(
        moe=moe,
        ep=ep,
        tokens=tokens,
        row_bytes=row_bytes,
        wire_bytes=float8_bytes(view.shape.hidden_size) if wire == "float8" else row_bytes,
        weight_bytes=weight_bytes(moe, view),
        saves_after=block.saves_after_experts,
        chunks=chunks,
    )
