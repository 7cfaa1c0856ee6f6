"""Bytes and seconds of gradient all-reduces over replicas, by `data_parallel.all_reduce`.

The closed forms are those of `comm/algorithms/registry.py`. A flat algorithm knows no nodes: if its ranks are
on several, all of its path is priced at the link between nodes, of a single card.
"auto" is priced as a ring of the backend.
"""

from __future__ import annotations

import numpy as np

from weft.comm.algorithms.registry import ALGORITHMS, Algorithm
from weft.plan.columns import ALL_REDUCES, Columns, Floats
from weft.plan.time.links import AxisLink, reduce_bytes


def replica_bytes(full_bytes: Floats, degree: Floats, columns: Columns) -> Floats:
    """Bytes sent by the busiest rank in an all-reduce."""
    found = reduce_bytes(full_bytes, degree)
    for row in np.flatnonzero(columns.all_reduce):
        found[row] = full_bytes[row] * float(_algorithm(columns, int(row)).sent(int(degree[row]), 1))
    return found


def replica_seconds(columns: Columns, links: tuple[AxisLink, AxisLink], moved: Floats, count: Floats) -> Floats:
    """Seconds of `count` all-reduces that send `moved` bytes; `links`: of all ranks with other rows, of replicas."""
    found = np.zeros(len(columns))
    for row in np.flatnonzero(columns.all_reduce * (moved > 0)):
        link = links[0 if columns.zero[row] == 0 else 1]
        size, algorithm = int(link.degree[row]), _algorithm(columns, int(row))
        others = float(link.off_node[row]) * (size - 1)
        per_node = round(size - others)
        if algorithm.refusal(size, per_node):
            per_node = 1
        full = moved[row] / float(algorithm.sent(size, 1))
        rates = (link.inside_bytes_per_s, link.between_bytes_per_s)
        paths = algorithm.path(size, per_node)
        found[row] = sum(
            float(path.share) * full / rate + count[row] * path.steps * float(link.latency_s[row])
            for path, rate in zip(paths, rates, strict=True)
        )
    return found


def _algorithm(columns: Columns, row: int) -> Algorithm:
    return ALGORITHMS["all_reduce"][ALL_REDUCES[int(columns.all_reduce[row])]]
