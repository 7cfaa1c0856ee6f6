"""The table of algorithms: by collective and name, with the closed forms that measurements are compared with.

    sent     elements that the busiest rank sends, as a share of the full tensor S
    path     elements that pass one after the other through the slowest card, as a share of S, by kind of link
    steps    messages that wait for one another, each at a latency, by kind of link

All hold for counts that divide evenly; tests compare both with counts of the messages themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2
from types import MappingProxyType

from weft.comm.algorithms import (
    all_gather_ring,
    all_reduce_halving,
    all_reduce_hierarchical,
    all_reduce_naive,
    all_reduce_ring,
    all_reduce_star,
    all_reduce_tree,
    all_to_all_pairs,
    broadcast_tree,
    gather_direct,
    reduce_scatter_ring,
    reduce_tree,
    scatter_direct,
)
from weft.comm.algorithms.rounds import Rounds

Form = Callable[[int, int], Fraction]  # of (ranks, ranks per node)


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """What passes one after the other, over one kind of link: shares of S, and messages."""

    share: Fraction
    steps: int


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One way of a collective. `path` gives (inside a node, between nodes); only `uses_nodes` tells them apart."""

    collective: str
    name: str
    rounds: Rounds
    order: str  # of the sum, for people
    sent: Form
    path: Callable[[int, int], tuple[CriticalPath, CriticalPath]]
    in_place: bool = True
    uses_nodes: bool = False

    def refusal(self, num_ranks: int, per_node: int) -> str:
        """Why the algorithm cannot run on these ranks; "" where it can."""
        if self.uses_nodes and num_ranks % per_node:
            return f"{self.name} needs nodes of equal size, and {per_node} ranks per node do not divide {num_ranks}"
        return ""


def _levels(size: int) -> int:
    return ceil(log2(size)) if size > 1 else 0


def _power(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _around(size: int, times: int) -> Fraction:
    return Fraction(times * (size - 1), size)


def _flat(
    share: Callable[[int], Fraction | int], steps: Callable[[int], int]
) -> Callable[[int, int], tuple[CriticalPath, CriticalPath]]:
    """A path over links that the algorithm does not tell apart: all of it counts as the slowest kind."""

    def path(size: int, per_node: int) -> tuple[CriticalPath, CriticalPath]:
        found, none = (
            CriticalPath(share=Fraction(share(size)), steps=steps(size)),
            CriticalPath(share=Fraction(0), steps=0),
        )
        return (found, none) if size <= per_node else (none, found)

    return path


def _by_node(size: int, per_node: int) -> tuple[CriticalPath, CriticalPath]:
    nodes = size // per_node
    inside = CriticalPath(share=_around(per_node, 2), steps=2 * (per_node - 1))
    return inside, CriticalPath(share=_around(nodes, 2) / per_node, steps=2 * (nodes - 1))


def _sent_by_node(size: int, per_node: int) -> Fraction:
    return sum((path.share for path in _by_node(size, per_node)), start=Fraction(0))


def _halving_share(size: int) -> Fraction:
    return _around(_power(size), 2) + (size != _power(size))


def _halving_path(size: int) -> Fraction:
    return _around(_power(size), 2) + 2 * (size != _power(size))


_NOTHING = "nothing is summed"
_RING = "chunk r from rank r + 1 on, around the ring"
_TREE = "neighbouring ranks, then pairs of pairs: ((0 + 1) + (2 + 3)) + ..."

_ALL = (
    Algorithm(
        collective="broadcast",
        name="tree",
        rounds=broadcast_tree.rounds,
        order=_NOTHING,
        sent=lambda n, _: Fraction(_levels(n)),
        path=_flat(_levels, _levels),
    ),
    Algorithm(
        collective="scatter",
        name="direct",
        rounds=scatter_direct.rounds,
        order=_NOTHING,
        sent=lambda n, _: _around(n, 1),
        path=_flat(lambda n: _around(n, 1), lambda n: 1),
    ),
    Algorithm(
        collective="gather",
        name="direct",
        rounds=gather_direct.rounds,
        order=_NOTHING,
        sent=lambda n, _: Fraction(1, n),
        path=_flat(lambda n: _around(n, 1), lambda n: 1),
    ),
    Algorithm(
        collective="reduce",
        name="tree",
        rounds=reduce_tree.rounds,
        order=_TREE,
        sent=lambda n, _: Fraction(1),
        path=_flat(_levels, _levels),
    ),
    Algorithm(
        collective="all_gather",
        name="ring",
        rounds=all_gather_ring.rounds,
        order=_NOTHING,
        sent=lambda n, _: _around(n, 1),
        path=_flat(lambda n: _around(n, 1), lambda n: n - 1),
    ),
    Algorithm(
        collective="reduce_scatter",
        name="ring",
        rounds=reduce_scatter_ring.rounds,
        order=_RING,
        sent=lambda n, _: _around(n, 1),
        path=_flat(lambda n: _around(n, 1), lambda n: n - 1),
    ),
    Algorithm(
        collective="all_to_all",
        name="pairs",
        rounds=all_to_all_pairs.rounds,
        order=_NOTHING,
        sent=lambda n, _: _around(n, 1),
        path=_flat(lambda n: _around(n, 1), lambda n: n - 1),
        in_place=False,
    ),
    Algorithm(
        collective="all_reduce",
        name="ring",
        rounds=all_reduce_ring.rounds,
        order=_RING,
        sent=lambda n, _: _around(n, 2),
        path=_flat(lambda n: _around(n, 2), lambda n: 2 * (n - 1)),
    ),
    Algorithm(
        collective="all_reduce",
        name="star",
        rounds=all_reduce_star.rounds,
        order="from the root on, in rank order",
        sent=lambda n, _: Fraction(n - 1),
        path=_flat(lambda n: 2 * (n - 1), lambda n: 2),
    ),
    Algorithm(
        collective="all_reduce",
        name="naive",
        rounds=all_reduce_naive.rounds,
        order="rank order: ((0 + 1) + 2) + ...",
        sent=lambda n, _: Fraction(n - 1),
        path=_flat(lambda n: n - 1, lambda n: 1),
        in_place=False,
    ),
    Algorithm(
        collective="all_reduce",
        name="tree",
        rounds=all_reduce_tree.rounds,
        order=_TREE,
        sent=lambda n, _: Fraction(_levels(n)),
        path=_flat(lambda n: 2 * _levels(n), lambda n: 2 * _levels(n)),
    ),
    Algorithm(
        collective="all_reduce",
        name="halving",
        rounds=all_reduce_halving.rounds,
        order="by distance, the farthest rank first; folded ranks before",
        sent=lambda n, _: _halving_share(n),
        path=_flat(_halving_path, lambda n: 2 * _levels(_power(n)) + 2 * (n != _power(n))),
    ),
    Algorithm(
        collective="all_reduce",
        name="hierarchical",
        rounds=all_reduce_hierarchical.rounds,
        order="around the ring of a node, then around the ring of nodes",
        sent=_sent_by_node,
        path=_by_node,
        uses_nodes=True,
    ),
)

ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = MappingProxyType(
    {
        collective: MappingProxyType({one.name: one for one in _ALL if one.collective == collective})
        for collective in dict.fromkeys(one.collective for one in _ALL)
    }
)
COLLECTIVES = tuple(ALGORITHMS)
