"""The interface of a data-parallel strategy: when gradients are reduced and when gathered weights are freed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from weft.engine.dp.float8_gather import Float8Gather


class Strategy:
    """One device. Others override what differs."""

    keeps_gradients_whole = False  # a shard's gradient waits unsharded until the last micro-batch
    float8: Float8Gather | None = None  # of sharded weights that travel so

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # what forward is called on

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: decides when gradients travel and gathered weights go."""
        return nullcontext()

    def stage(self, blocks: Sequence[str], *, is_last: bool, is_very_last: bool) -> AbstractContextManager[None]:
        """As `microbatch`, for a backward of one pipeline stage; `is_very_last`: of all stages that the rank has."""
        return self.microbatch(is_last=is_very_last)

    def keep_apart(self, stages: Sequence[Sequence[str]]) -> None:
        """Told once: the blocks of each pipeline stage that the rank has."""

    def backward_input(self) -> AbstractContextManager[None]:
        """Around a backward whose weights' gradients come later: nothing travels yet."""
        return nullcontext()

    def backward_weight(self) -> None:
        """When these gradients are there; inside `microbatch`."""

    def after_backwards(self) -> None:
        """When the last backward of a pipeline's step is done."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients that no backward has reduced, over the ranks that see other rows."""

    def after_evaluation(self) -> None:
        self.drop_gathered()
        self._weights_may_change()

    def drop_gathered(self) -> None:
        """What an evaluation left gathered."""

    def after_update(self, optimizer: Optimizer) -> None:
        self.clear_gradients(optimizer)
        self._weights_may_change()

    def clear_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    @property
    def num_in_float8(self) -> int:
        """Weights that travel so: their scales cost an all-reduce a step."""
        return len(self.float8) if self.float8 is not None else 0

    def _weights_may_change(self) -> None:
        if self.float8 is not None:
            self.float8.weights_may_change()

    def gradient_buckets(self) -> list[torch.Tensor]:
        """Memory set aside for gradients; empty where gradients are tensors of their own."""
        return []
