"""Sums of gradients in codes by node (`data_parallel.reduce_neighbours`): the choice, the bytes and the seconds.

    all ranks       every rank sends S (n - 1) / n, of which S (n - k) / n leave a node of k ranks by its card
    by node         S (k - 1) / k inside, and (S / k) (m - 1) / m to m nodes: each k times less

S: the codes of all gradients. An all-reduce sends as many once more, in all-gathers between nodes, then inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core import axes
from weft.core.wire_bytes import CODED
from weft.plan.columns import Columns, Floats, Ints
from weft.plan.request import Request
from weft.plan.time.links import gather_bytes, reducing_link


def chosen_neighbours(request: Request, columns: Columns) -> Ints:
    """The ranks of a node, where 8-bit codes of gradients go to several; 0 elsewhere."""
    link = reducing_link(request.cluster, columns)
    ranks = columns.reducing
    near = np.rint(ranks - link.off_node * (ranks - 1)).astype(np.int64)
    divides = (near > 1) & (near < ranks) & (ranks % np.maximum(near, 1) == 0)
    return np.where(divides & (columns.ep == 1) & (request.precision.reduce in CODED), near, 0)


def by_node(columns: Columns, full_bytes: Floats) -> Iterator[tuple[str, Floats]]:
    """(axis, bytes that a rank sends) of one half of a sum by node; zero without."""
    near = np.maximum(columns.reduce_neighbours, 1).astype(np.float64)
    is_on, nodes = columns.reduce_neighbours > 0, columns.reducing / near
    yield axes.DP_INSIDE, gather_bytes(full_bytes, near) * is_on
    yield axes.DP_BETWEEN, gather_bytes(full_bytes / near, nodes) * is_on
