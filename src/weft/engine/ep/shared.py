"""Shared experts are computed while tokens travel to the other experts, and so is their backward.

A block calls its experts, then its shared experts with the same hidden states (DeepSeek, GLM and about 25 families). A
dispatcher computes the shared ones between the two ends of its exchange; the block's own call then returns the result.
The kernels stay on one stream: only their order changes, and no value.

Families that call shared experts first (qwen2_moe) overlap nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.engine.wrap_forward import Forward, replace_own, wrap_forward
from weft.models.ep.shared import shared_after


def overlap_shared(model: nn.Module, experts_name: str) -> EarlyShared | None:
    """Make the shared experts that a block calls after a module of experts ready for it; None without such."""
    module = shared_after(model, experts_name)
    if module is None:
        return None
    early = EarlyShared(module)
    wrap_forward(module, early)
    return early


class _Made(NamedTuple):
    output: Tensor
    hidden: Tensor
    version: int

    def is_of(self, hidden: Tensor) -> bool:
        """Whether these are the same values in the same memory."""
        is_same = hidden.untyped_storage()._cdata == self.hidden.untyped_storage()._cdata  # of fake tensors too
        is_whole = hidden.numel() == self.hidden.numel() and hidden.storage_offset() == self.hidden.storage_offset()
        return is_same and is_whole and hidden.is_contiguous() and hidden._version == self.version


class EarlyShared:
    """The layer around the forward of a module of shared experts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._made: _Made | None = None
        self._is_early = False
        self.compiled: Forward | None = None

    def compile_inside(self, compiled: Callable[..., Forward]) -> None:
        replace_own(self._module, compiled)

    def compute(self, hidden: Tensor) -> None:
        """The result for these hidden states, kept for the block's own call."""
        self._is_early = True
        try:
            self._made = _Made(self._module.forward(hidden), hidden, hidden._version)
        finally:
            self._is_early = False

    def forget(self) -> None:
        self._made = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it was computed outside of the block's graphs
    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        made = self._made
        if self._is_early:
            return forward(*args, **kwargs)
        self.forget()
        if made is None or kwargs or len(args) != 1 or not made.is_of(args[0]):
            return forward(*args, **kwargs)
        return made.output if made.output.ndim == args[0].ndim else made.output.view(*args[0].shape[:-1], -1)
