"""`ShardedEmbedding`: nn.Embedding and nn.EmbeddingBag whose rows live on parameter servers.

It holds no rows and no optimizer: a forward reads the rows of its unique keys through the current `RowSession`, and
the trainer takes their gradients after the backward. Keys are any int64, so there is no size; a key that was never
trained reads its initial value.

    mode None:  rows[..., dim] for keys[...]            as nn.Embedding
    mode "sum" | "mean" | "max":  one row for each bag  as nn.EmbeddingBag (offsets, per_sample_weights)
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import TableError
from weft.core.table_spec import Eviction, RowInit, RowOptimizer, TableSpec
from weft.server.session import current_session

Mode = Literal["sum", "mean", "max"]


class ShardedEmbedding(nn.Module):
    """Several of one model may share a table; they must describe it alike."""

    def __init__(
        self,
        table: str,
        dim: int,
        *,
        mode: Mode | None = None,
        optimizer: RowOptimizer | None = None,
        init: RowInit | None = None,
        admit_after: int = 1,
        eviction: Eviction | None = None,
        tier: Literal["memory", "mapped"] = "memory",
    ) -> None:
        super().__init__()
        self.mode = mode
        self.spec = TableSpec(
            name=table,
            dim=dim,
            optimizer=optimizer or RowOptimizer(),
            init=init or RowInit(),
            admit_after=admit_after,
            eviction=eviction or Eviction(),
            tier=tier,
        )

    def forward(self, keys: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        flat = keys.detach().reshape(-1).long().numpy()
        rows, places = current_session().lookup(self.spec.name, flat)
        index = places.reshape(keys.shape)
        if self.mode is None:
            return F.embedding(index, rows)
        return F.embedding_bag(index, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)

    def extra_repr(self) -> str:
        return f"{self.spec.name!r}, {self.spec.dim}, mode={self.mode!r}"


def table_specs(model: nn.Module) -> list[TableSpec]:
    """The tables that a model's embeddings need, each once."""
    found: dict[str, TableSpec] = {}
    for module in model.modules():
        if not isinstance(module, ShardedEmbedding):
            continue
        spec = module.spec
        if found.setdefault(spec.name, spec) != spec:
            raise TableError(
                f"two embeddings describe the table {spec.name!r} differently",
                hint="same dim, optimizer and init, or another name",
            )
    return list(found.values())
