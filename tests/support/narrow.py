"""A model whose shards are uneven, and some of them empty. For tests only."""

from __future__ import annotations

import torch
from torch import nn


class Narrow(nn.Module):
    """A matrix of 3 long rows: over 4 ranks one rank has none; and one of 67, which no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 67), nn.GELU(), nn.Linear(67, 64)) for _ in range(2))
        self.long = nn.Parameter(torch.randn(3, 2048) * 0.02)
        self.head = nn.Linear(64, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * (1 + self.long.mean())
