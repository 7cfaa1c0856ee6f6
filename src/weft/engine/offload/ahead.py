"""Hides transfers of the device update behind the blocks, in memory that activations do not use at that moment.

    last backward of a step     activations are freed block by block: chunks of states are loaded into their room
    first forward of the next   activations grow block by block: updated chunks, stored meanwhile, free their memory

The device's peak stays that of the step without chunks: after a block's backward chunks take at most the memory that
was freed since the first block's, so a block never begins with more than the one before. Bits do not change: only the
time of copies does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from weft.engine.offload.updates import DeviceUpdate


class AheadOfUpdate:
    """Hooks on the blocks of one rank, whose micro-batches run one after the other."""

    def __init__(
        self, update: DeviceUpdate, blocks: Sequence[nn.Module], *, num_microbatches: int, allocated: Callable[[], int]
    ) -> None:
        """`allocated`: bytes of the device that tensors hold now."""
        self._update, self._num_blocks, self._allocated = update, len(blocks), allocated
        self._num_microbatches = num_microbatches
        self._forwards = 0  # of this step
        self._held = 0  # chunks that were leaving when the step began
        self._most_bytes: int | None = None  # allocated after the first block's backward, in the last micro-batch
        for place, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook_of(place), with_kwargs=True)

    def step_done(self) -> None:
        self._forwards, self._held, self._most_bytes = 0, self._update.num_leaving, None

    def _hook_of(self, place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self._update.release(keep=0)
                return
            self._before_block(place, [*args, *kwargs.values()])

        return hook

    def _before_block(self, place: int, inputs: Sequence[Any]) -> None:
        if place == 0:
            if self._forwards >= self._num_microbatches:  # the step before was skipped, or failed
                self._forwards, self._most_bytes = 0, None
                self._update.forget()
            self._forwards += 1
        if self._forwards == 1:
            self._update.release(keep=self._held * (self._num_blocks - 1 - place) // self._num_blocks)
        if self._forwards == self._num_microbatches:
            hidden = (one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad)
            first = next(hidden, None)
            if first is not None:
                first.register_hook(self._after_block)  # type: ignore[no-untyped-call]

    def _after_block(self, _gradient: torch.Tensor) -> None:
        """The gradient of a block's input exists: its activations are freed."""
        now = self._allocated()
        self._most_bytes = now if self._most_bytes is None else self._most_bytes
        self._update.load_ahead(self._most_bytes - now)
