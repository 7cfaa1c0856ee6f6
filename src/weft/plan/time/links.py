"""Seconds of collectives on a cluster: alpha-beta links, ring factors, axes that span nodes.

| collective     | bytes sent per rank, S the full tensor |
| -------------- | -------------------------------------- |
| all_gather     | S (n - 1) / n                          |
| reduce_scatter | S (n - 1) / n                          |
| all_reduce     | 2 S (n - 1) / n                        |
| all_to_all     | S (n - 1) / n, S the local tensor      |
| broadcast      | S                                      |
| reduce         | S                                      |
| send           | S                                      |

An axis with k ranks per node uses k network cards at once:
rate = min(inside, k * between). Latency: the steps of a ring, at most the 2 log2 n of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.axes import CP, DP_BETWEEN, DP_INSIDE, DP_SHARD, EDP, EP, MESH_ORDER, TP
from weft.core.cluster import Cluster
from weft.core.muon import AXIS
from weft.plan.columns import Columns, Floats

# context-parallel ranks share one copy of the states with their shards; muon's exchanges are among all that share one
SHARED = {DP_SHARD: (DP_SHARD, CP), AXIS: (DP_SHARD, CP, TP)}


@dataclass(frozen=True)
class AxisLink:
    """Degree, bandwidth and latency of an axis."""

    degree: Floats
    bytes_per_s: Floats
    latency_s: Floats  # per step
    off_node: Floats  # share of the other ranks that are on other nodes
    between_bytes_per_s: float  # per network card
    inside_bytes_per_s: float

    def exchange_seconds(self, wire_bytes: Floats, *, num_calls: Floats | float = 1.0) -> Floats:
        """Seconds of all-to-alls: bytes to other nodes go through the rank's network card."""
        outside = wire_bytes * self.off_node
        waiting = np.where(self.degree > 1, num_calls * self.latency_s, 0.0)
        return (
            np.maximum(outside / self.between_bytes_per_s, (wire_bytes - outside) / self.inside_bytes_per_s) + waiting
        )

    def hop_seconds(self, wire_bytes: Floats, *, num_calls: Floats | float = 1.0) -> Floats:
        """Seconds of sends to the next rank: all wait for the one whose message leaves its node, through its card."""
        rate = np.where(
            self.off_node > 0, min(self.between_bytes_per_s, self.inside_bytes_per_s), self.inside_bytes_per_s
        )
        return np.asarray(wire_bytes / rate + num_calls * self.latency_s, dtype=np.float64)

    def seconds(self, wire_bytes: Floats, *, num_calls: Floats | float = 1.0) -> Floats:
        """Seconds of `num_calls` collectives with `wire_bytes` per rank in total."""
        steps = np.minimum(np.maximum(self.degree - 1, 0), 2 * np.log2(np.maximum(self.degree, 2)))
        waiting = np.where(self.degree > 1, num_calls * steps * self.latency_s, 0.0)
        return np.asarray(wire_bytes / self.bytes_per_s + waiting, dtype=np.float64)


def axis_link(cluster: Cluster, columns: Columns, axes: tuple[str, ...]) -> AxisLink:
    """The link of these axes, which must be adjacent in the mesh."""
    return _link(cluster, *inner_degree(columns, axes))


def _link(cluster: Cluster, inner: Floats, degree: Floats) -> AxisLink:
    span = inner * degree
    per_node = cluster.devices_per_node
    crosses = span > per_node
    in_node = np.clip(per_node / inner, 1, degree)
    between = np.minimum(cluster.inside.bytes_per_s, in_node * cluster.between.bytes_per_s)
    return AxisLink(
        degree=degree,
        bytes_per_s=np.where(crosses, between, cluster.inside.bytes_per_s),
        latency_s=np.where(crosses, cluster.between.latency_s, cluster.inside.latency_s),
        off_node=np.where(crosses, (degree - in_node) / np.maximum(degree - 1, 1), 0.0),
        between_bytes_per_s=cluster.between.bytes_per_s,
        inside_bytes_per_s=cluster.inside.bytes_per_s,
    )


def backward_link(cluster: Cluster, columns: Columns) -> AxisLink:
    """The link of the ranks that ZeRO-3's backward gathers weights from: a secondary shard's are adjacent."""
    inner, degree = inner_degree(columns, SHARED[DP_SHARD])
    return _link(cluster, inner, np.where(columns.secondary_shard > 0, columns.secondary_shard, degree))


def reducing_link(cluster: Cluster, columns: Columns) -> AxisLink:
    """The link of the ranks that reduce gradients among them: shards, or replicas without them."""
    inner, _ = inner_degree(columns, (DP_SHARD, CP))
    return _link(cluster, inner, columns.reducing.astype(np.float64))


def node_links(cluster: Cluster, columns: Columns) -> dict[str, AxisLink]:
    """The links of a sum by node: among neighbours, and among ranks in the same place of all nodes."""
    inner, _ = inner_degree(columns, (DP_SHARD, CP))
    near = np.maximum(columns.reduce_neighbours, 1).astype(np.float64)
    return {DP_INSIDE: _link(cluster, inner, near), DP_BETWEEN: _link(cluster, inner * near, columns.reducing / near)}


def expert_link(cluster: Cluster, columns: Columns) -> AxisLink:
    """The link of the ep ranks, which are adjacent on the sharding axes with a stride of expert_tp."""
    degree = columns.ep.astype(np.float64)
    inner = columns.expert_tp.astype(np.float64)
    return _link(cluster, inner, degree)


def expert_shard_link(cluster: Cluster, columns: Columns) -> AxisLink:
    """The link of the ranks with the same experts (edp), with the ranks of other experts in between."""
    inner = columns.expert_tp * columns.ep
    return _link(cluster, inner.astype(np.float64), columns.edp.astype(np.float64))


def context_links(cluster: Cluster, columns: Columns) -> tuple[AxisLink, AxisLink]:
    """The links of context-parallel neighbours that exchange heads, and of ranks that exchange keys and values."""
    inner, _ = inner_degree(columns, (CP,))
    near = columns.head_ranks.astype(np.float64)
    return _link(cluster, inner, near), _link(cluster, inner * near, columns.key_ranks.astype(np.float64))


def link_of(cluster: Cluster, columns: Columns, axis: str) -> AxisLink:
    """The link of an axis, of experts and of sums by node too."""
    if axis in (DP_INSIDE, DP_BETWEEN):
        return node_links(cluster, columns)[axis]
    of_experts = {EP: expert_link, EDP: expert_shard_link}.get(axis)
    return of_experts(cluster, columns) if of_experts else axis_link(cluster, columns, SHARED.get(axis, (axis,)))


def leaves_node(cluster: Cluster, columns: Columns, axis: str) -> bool:
    """Whether the axis spans nodes in the one plan of `columns`."""
    return bool(link_of(cluster, columns, axis).off_node[0] > 0)


def inner_degree(columns: Columns, axes: tuple[str, ...]) -> tuple[Floats, Floats]:
    """(stride of these axes, number of ranks on them)."""
    innermost = max(MESH_ORDER.index(axis) for axis in axes)
    inner = np.ones(len(columns))
    for axis in MESH_ORDER[innermost + 1 :]:
        inner = inner * columns.degree(axis)
    degree = np.ones(len(columns))
    for axis in axes:
        degree = degree * columns.degree(axis)
    return inner, degree


def gather_bytes(full_bytes: Floats, degree: Floats) -> Floats:
    """Bytes sent per rank in an all-gather or a reduce-scatter."""
    return np.asarray(full_bytes * (degree - 1) / degree, dtype=np.float64)


def passed_bytes(full_bytes: Floats, degree: Floats) -> Floats:
    """Bytes sent per rank in a broadcast or a reduce to one rank: every rank passes the tensor on."""
    return np.asarray(full_bytes * (degree > 1), dtype=np.float64)


def reduce_bytes(full_bytes: Floats, degree: Floats) -> Floats:
    """Bytes sent per rank in an all-reduce."""
    return 2 * gather_bytes(full_bytes, degree)
