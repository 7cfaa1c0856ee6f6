"""The mesh axes and their order, outermost first: neighbouring ranks differ in the last axis. `register` adds one.

rank = ((((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t, so tensor-parallel peers are neighbours
on the fastest links and pipeline stages are far apart. `ep` is taken out of dp_shard x cp (x tp) and adds no ranks:
dp_shard x cp (x tp) = edp x ep, and an expert's states are sharded over edp.
"""

from __future__ import annotations

import sys
from typing import Final

PP: Final = "pp"
DP_REPLICATE: Final = "dp_replicate"
DP_SHARD: Final = "dp_shard"
CP: Final = "cp"
TP: Final = "tp"
EP: Final = "ep"  # no axis of the mesh
EDP: Final = "edp"  # the ranks with the same experts; no axis of the mesh
DP_INSIDE: Final = "dp_inside"  # neighbours of a node in sums by node; no axis of the mesh
DP_BETWEEN: Final = "dp_between"  # ranks in the same place of all nodes, in the same sums

MESH_ORDER: Final = [PP, DP_REPLICATE, DP_SHARD, CP, TP]
DATA_AXES: Final = (DP_REPLICATE, DP_SHARD)
REGISTERED: Final[list[str]] = []  # registered axes; each replicates unless it declares otherwise


def register(axis: str) -> None:
    """Add `axis` to the mesh, with a key of its name in [mesh]. Pipelines stay outermost.

    Call it before `weft.core.plan` is imported, in every process: the keys of a plan are fixed from then on.
    """
    if "weft.core.plan" in sys.modules:
        raise RuntimeError(f"axis {axis!r} is registered too late: weft.core.plan is imported already")
    if axis in (*MESH_ORDER, EP) or not axis.isidentifier():
        raise ValueError(f"{axis!r} is already an axis, or not an identifier")
    REGISTERED.append(axis)
    MESH_ORDER.insert(1, axis)
