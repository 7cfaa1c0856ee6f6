"""All-reduce by a binomial tree: reduce to rank 0, then broadcast.

Sends: the root S x ceil(log2 N), others less. Steps: 2 ceil(log2 N), each of S: for small tensors.
Order: that of the reduce, ((0 + 1) + (2 + 3)) + (4 + 5).
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms import broadcast_tree, reduce_tree
from weft.comm.algorithms.rounds import CollectiveTask, Round


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    yield from reduce_tree.rounds(task, rank)
    yield from broadcast_tree.rounds(task, rank)
