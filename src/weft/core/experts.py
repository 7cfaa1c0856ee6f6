"""Dispatchers of expert parallelism: rows that they send, and the one rule that chooses between them. Arithmetic only.

Rows of hidden states that leave a rank per token, with E experts, K per token, and a router that chooses evenly:

    pairs     K (1 - 1/ep)                              one row per expert
    tokens    (ep - 1) (1 - C(E - E/ep, K) / C(E, K))   one row per rank that holds one of its experts
    gather    ep - 1                                    all rows to all ranks: sizes do not depend on the router
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from weft.core.shards import balanced_span

DispatcherKind = Literal["pairs", "tokens", "gather"]
DISPATCHERS: tuple[DispatcherKind, ...] = get_args(DispatcherKind)
WireFormat = Literal["activations", "float8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
WIRE_BLOCK = 128  # elements of a row that share a scale in float8
_SCALE_BYTES = 4
MOST_GATHERED = 1.15  # rows of gather per row of tokens at which fixed sizes, which no host waits for, are still better


def rows_sent(kind: DispatcherKind, *, num_experts: int, top_k: int, ep: int) -> float:
    """Rows of hidden states that leave a rank per token: the mean over the ranks, which may hold unequal numbers."""
    if kind == "gather":
        return float(ep - 1)
    if kind == "pairs":
        return top_k * (1 - 1 / ep)
    return (1 - 1 / ep) * sum(ranks_reached(num_experts=num_experts, top_k=top_k, ep=ep))


def ranks_reached(*, num_experts: int, top_k: int, ep: int) -> list[float]:
    """For each rank the probability that it holds an expert of a token."""
    held = (balanced_span(num_experts, degree=ep, place=place).size for place in range(ep))
    choices = math.comb(num_experts, top_k)
    return [1 - math.comb(num_experts - size, top_k) / choices for size in held]


def float8_bytes(hidden_size: int) -> int:
    """Bytes of a row of hidden states in float8, with its scales."""
    return -(-hidden_size // WIRE_BLOCK) * (WIRE_BLOCK + _SCALE_BYTES)


def choose_dispatcher(layers: Iterable[tuple[int, int | None]], *, ep: int) -> DispatcherKind:
    """`gather` if it sends at most MOST_GATHERED times the rows of `tokens` in every layer, else `tokens`.

    `layers`: (experts, experts per token) of each; None: only the forward knows.
    """

    def gathers(num_experts: int, top_k: int | None) -> bool:
        if top_k is None or top_k > num_experts:
            return False
        return ep - 1 <= MOST_GATHERED * rows_sent("tokens", num_experts=num_experts, top_k=top_k, ep=ep)

    return "gather" if all(gathers(*layer) for layer in layers) else "tokens"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What one rank's exchange routes: `tokens` of every rank, `top_k` experts each, over `ep` ranks."""

    tokens: int
    top_k: int
    num_experts: int
    ep: int
    rank: int

    def expected(self, *, imbalance: float = 1.0) -> dict[str, tuple[int, ...]]:
        """Counts by rank. A pair is a token and an expert; a row is a token and a rank that holds one of its experts.

        This rank is chosen `imbalance` times as often as by an even router, and the others less.
        """
        spans = [balanced_span(self.num_experts, degree=self.ep, place=place).size for place in range(self.ep)]
        share = spans[self.rank] / self.num_experts
        own = min(1.0, share * imbalance)
        rest = (1 - own) / (1 - share) if share < 1 else 0.0
        reached = ranks_reached(num_experts=self.num_experts, top_k=self.top_k, ep=self.ep)
        pairs = [self.tokens * self.top_k * size / self.num_experts for size in spans]
        scale = [own / share if place == self.rank else rest for place in range(self.ep)]
        rows_sent = [
            min(self.tokens, math.ceil(self.tokens * min(1.0, chance * factor)))
            for chance, factor in zip(reached, scale, strict=True)
        ]
        pairs_sent = _rounded([count * factor for count, factor in zip(pairs, scale, strict=True)])
        return {
            "rows_sent": tuple(rows_sent),
            "rows_received": (rows_sent[self.rank],) * self.ep,
            "pairs_sent": tuple(pairs_sent),
            "pairs_received": (pairs_sent[self.rank],) * self.ep,
        }


def _rounded(values: list[float]) -> list[int]:
    """Integers that add up to the same total, which is an integer."""
    ends = [round(sum(values[: index + 1])) for index in range(len(values))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
