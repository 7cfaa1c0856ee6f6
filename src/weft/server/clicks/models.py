"""Click models: logistic, wide & deep, DeepFM. Plain modules over one `ShardedEmbedding`.

A row of the table is (wide weight, vector of embedding_dim); a logistic model's row is the wide weight alone.

    logistic:   b + sum_f w_f + numeric . a
    wide_deep:  logistic + mlp(vectors, numeric)
    deepfm:     wide_deep + sum_{f<g} v_f . v_g = wide_deep + (|sum v|^2 - sum |v|^2) / 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.core.server_spec import ServerRun
from weft.server.model.embedding import ShardedEmbedding

TABLE = "embedding"


class ClickModel(nn.Module):
    """keys [n, fields] and numeric [n, counts] to logits [n]."""

    def __init__(self, run: ServerRun) -> None:
        super().__init__()
        spec = run.model
        self.kind = spec.kind
        dim = 0 if spec.kind == "logistic" else spec.embedding_dim
        self.embedding = ShardedEmbedding(TABLE, 1 + dim, **dict(run.sparse))
        self.bias = nn.Parameter(torch.zeros(1))
        self.numeric = nn.Linear(run.data.numeric, 1, bias=False) if run.data.numeric else None
        self.deep = _mlp(run.data.categorical * dim + run.data.numeric, spec.hidden) if dim else None

    def forward(self, keys: Tensor, numeric: Tensor) -> Tensor:
        rows = self.embedding(keys)
        logits: Tensor = rows[..., 0].sum(dim=1) + self.bias
        if self.numeric is not None:
            logits = logits + self.numeric(numeric).squeeze(1)
        if self.deep is None:
            return logits
        vectors = rows[..., 1:]
        logits = logits + self.deep(torch.cat([vectors.flatten(1), numeric], dim=1)).squeeze(1)
        return logits + pairwise_products(vectors) if self.kind == "deepfm" else logits


def pairwise_products(vectors: Tensor) -> Tensor:
    """Sum over pairs of fields of their vectors' dot products: [n, fields, dim] to [n]."""
    of_sum = vectors.sum(dim=1).square().sum(dim=1)
    return 0.5 * (of_sum - vectors.square().sum(dim=(1, 2)))


def _mlp(width: int, hidden: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1))
