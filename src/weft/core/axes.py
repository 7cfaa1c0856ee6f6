"""The mesh axes and their order, outermost first: neighbouring ranks differ in the last axis.

rank = ((((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t, so tensor-parallel peers are neighbours
on the fastest links and pipeline stages are far apart. `ep` is taken out of dp_shard x cp (x tp) and adds no ranks.
"""

from __future__ import annotations

from typing import Final

PP: Final = "pp"
DP_REPLICATE: Final = "dp_replicate"
DP_SHARD: Final = "dp_shard"
CP: Final = "cp"
TP: Final = "tp"
EP: Final = "ep"  # no axis of the mesh

MESH_ORDER: Final = (PP, DP_REPLICATE, DP_SHARD, CP, TP)
DATA_AXES: Final = (DP_REPLICATE, DP_SHARD)
