"""Parameter servers: tables of rows, the servers that hold them, and the workers that train on them.

`weft.server.Trainer` trains a model of your own, `ShardedEmbedding` is its embedding, `Client` reads and writes rows.
Each public name is imported from its file when first used.
"""

from __future__ import annotations

from weft.core.lazy_names import import_when_used

_HOMES = {
    "Client": "weft.server.client",
    "Endpoint": "weft.server.wire.endpoint",
    "RowSession": "weft.server.session",
    "Server": "weft.server.node.server",
    "NodeSpec": "weft.server.node.spec",
    "ShardedEmbedding": "weft.server.embedding",
    "Task": "weft.server.task",
    "Trainer": "weft.server.trainer",
    "ServerRun": "weft.core.server_spec",
    "TableSpec": "weft.core.table_spec",
    "RowOptimizer": "weft.core.table_spec",
    "RowInit": "weft.core.table_spec",
    "Eviction": "weft.core.table_spec",
}

__all__ = [
    "Client",
    "Endpoint",
    "Eviction",
    "NodeSpec",
    "RowInit",
    "RowOptimizer",
    "RowSession",
    "Server",
    "ServerRun",
    "ShardedEmbedding",
    "TableSpec",
    "Task",
    "Trainer",
]


__getattr__ = import_when_used(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
