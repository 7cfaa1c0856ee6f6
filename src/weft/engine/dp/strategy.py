"""The interface of a data-parallel strategy: when gradients are reduced and when gathered weights are freed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from weft.engine.dp.float8_gather import Float8Gather


class Strategy:
    """One device. Subclasses override the differences."""

    accumulates_unsharded = False  # gradients stay unsharded until the last micro-batch
    float8: Float8Gather | None = None  # of sharded weights that are gathered in float8

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # the callable of forwards
        self.errors: dict[str, torch.Tensor] = {}  # of gradients that this rank sent as codes, with error feedback

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: decides when to reduce gradients and free gathered weights."""
        return nullcontext()

    def stage(self, blocks: Sequence[str], *, is_last: bool, is_very_last: bool) -> AbstractContextManager[None]:
        """As `microbatch`, for a backward of one pipeline stage; `is_very_last`: the last of all stages of the rank."""
        return self.microbatch(is_last=is_very_last)

    def prefetch_within_stages(self, stages: Sequence[Sequence[str]]) -> None:
        """Called once, with the blocks of each pipeline stage of the rank."""

    def backward_input(self) -> AbstractContextManager[None]:
        """Around a backward of inputs alone: weight gradients come later, so nothing is reduced."""
        return nullcontext()

    def backward_weight(self) -> None:
        """After the weight gradients are computed; inside `microbatch`."""

    def after_backwards(self) -> None:
        """After the last backward of a pipeline's step."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce gradients that no backward has reduced, over the data-parallel ranks."""

    def after_evaluation(self) -> None:
        self.drop_gathered()
        self._weights_may_change()

    def drop_gathered(self) -> None:
        """Free weights that an evaluation left gathered."""

    def after_update(self, optimizer: Optimizer) -> None:
        self.clear_gradients(optimizer)
        self._weights_may_change()

    def clear_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    @property
    def num_in_float8(self) -> int:
        """Weights gathered in float8: their scales cost one all-reduce per step."""
        return len(self.float8) if self.float8 is not None else 0

    def _weights_may_change(self) -> None:
        if self.float8 is not None:
            self.float8.weights_may_change()

    def gradient_buckets(self) -> list[torch.Tensor]:
        """Preallocated memory of gradients; empty if gradients are separate tensors."""
        return []
