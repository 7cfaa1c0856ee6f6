"""A module with buffers of every kind that a forward changes, and an objective for it. For tests only.

A batch norm before the blocks and one in each, one without parameters; a mean that is kept through `.data`; a counter
that is replaced instead of written to; one that no checkpoint has; a table that never changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.objective import Batch

ROWS, WIDTH = 16, 12


class Squares:
    """The sum of squared errors; every row counts one."""

    def weight(self, batch: Batch) -> Tensor:
        return torch.tensor(float(len(batch["inputs"])))

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["inputs"]) - batch["targets"]).square().sum()


class Kept(nn.Module):
    """Divides by a running size of what passes, which it reads before it changes it."""

    mean: Tensor
    count: Tensor
    recent: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("recent", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = x * self.table / (1.0 + self.mean)
        if self.training:
            self.mean.data.mul_(0.5).add_(x.detach().abs().mean(0), alpha=0.5)
            self.count = self.count + 1
            self.recent.copy_(x.detach().mean())
        return given


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.kept = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Kept()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kept(self.norm(self.linear(x)).tanh())  # type: ignore[no-any-return]


class Buffered(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(self.first(inputs))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))  # type: ignore[no-any-return]


def build(plan: dict[str, Any] | None = None, *, model: nn.Module | None = None) -> Engine:
    torch.manual_seed(0)
    model = model if model is not None else Buffered()
    # sgd: a bias before a batch norm has no gradient but rounding, of which adam would make whole steps
    return Engine(model, Plan.from_tables(plan or {}), optimizer="sgd", objective=Squares(), device="cpu")


def global_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, WIDTH, generator=generator) * (1.0 + torch.arange(ROWS).unsqueeze(1) / 4)
    return {"inputs": inputs, "targets": torch.randn(ROWS, 3, generator=generator)}


def train(engine: Engine, steps: int, *, first: int = 0) -> list[float]:
    """Losses, and the evaluation after the last step."""
    share = engine.share_of
    losses = [engine.step(share(global_batch(step)), learning_rate=1e-2).loss for step in range(first, first + steps)]
    return [*losses, engine.evaluate(share(global_batch(99))).loss]


def own_buffers(engine: Engine) -> dict[str, Tensor]:
    """Those that this rank's stages have."""
    foreign = engine.buffer_sync.is_foreign
    return {name: value.clone() for name, value in engine.model.named_buffers() if not foreign(name)}
