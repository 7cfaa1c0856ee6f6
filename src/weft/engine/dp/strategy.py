"""The face every data-parallel strategy shows the engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn


class Strategy:
    """One device. Others override what differs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # what forward is called on

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: decides when gradients travel and gathered weights go."""
        return nullcontext()

    def after_evaluation(self) -> None:
        """Drop what an evaluation left gathered."""
