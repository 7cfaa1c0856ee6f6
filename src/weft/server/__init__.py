"""Parameter servers: tables of rows, the servers that hold them, and the workers that train on them.

`weft.server.Trainer` trains a model of your own, `ShardedEmbedding` is its embedding, `Client` reads and writes rows.
Each public name is imported from its file when first used.
"""

from __future__ import annotations

from weft.core.lazy_names import import_when_used

_HOMES = {
    "Client": "weft.server.client",
    "Endpoint": "weft.server.wire.sockets",
    "RowSession": "weft.server.model.embedding",
    "Server": "weft.server.node.server",
    "NodeSpec": "weft.server.node.state",
    "ShardedEmbedding": "weft.server.model.embedding",
    "Task": "weft.server.model.task",
    "Trainer": "weft.server.job.trainer",
    "ServerRun": "weft.core.server_spec",
    "TableSpec": "weft.core.table_spec",
    "RowOptimizer": "weft.core.table_spec",
    "RowInit": "weft.core.table_spec",
    "Eviction": "weft.core.table_spec",
}

__all__ = sorted(_HOMES)

__getattr__ = import_when_used(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
