"""Hides transfers of the device update behind the blocks, in memory that activations do not use at that moment.

    last backward of a step     activations are freed block by block: chunks of states are loaded into their room
    first forward of the next   activations grow block by block: updated chunks, stored meanwhile, free their memory

Without `staging_bytes` the peak during the blocks stays that of the step without chunks: after a block's backward
chunks take at most the memory that was freed since the first block's, so a block never begins with more than the one
before. Chunks of `staging_bytes` besides are stored during the first half of the step and loaded during the second,
behind as many micro-batches as that takes. No more is loaded ahead than the link carries before the update begins: what
arrives later would be stored later too, while loads and stores of other chunks run at the same time. Bits do not
change: only the time of copies does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from weft.engine.offload.updates import DeviceUpdate


def hides_copies(device: torch.device) -> bool:
    """Whether copies run beside the computation; a dry run of a GPU says so too."""
    return device.type == "cuda"


def allocated_bytes(device: torch.device) -> int:
    """Bytes of the device that tensors hold now; a dry run has its own count."""
    return torch.cuda.memory_allocated(device)


class AheadOfUpdate:
    """Hooks on the blocks of one rank, whose micro-batches run one after the other."""

    def __init__(
        self,
        update: DeviceUpdate,
        blocks: Sequence[nn.Module],
        *,
        num_microbatches: int,
        staging_bytes: int,
        allocated: Callable[[], int],
    ) -> None:
        """`allocated`: bytes of the device that tensors hold now."""
        self._update, self._num_blocks, self._allocated = update, len(blocks), allocated
        self._num_microbatches, self._staging_bytes = num_microbatches, staging_bytes
        self._num_calls = 2 * num_microbatches * len(blocks)  # forwards and backwards of blocks in a step
        self._calls = 0  # of this step
        self._held_bytes = 0  # of chunks that were leaving when the step began
        self._most_bytes: int | None = None  # of other tensors after the first block's backward, last micro-batch
        for place, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook_of(place), with_kwargs=True)

    def step_done(self) -> None:
        self._calls, self._held_bytes, self._most_bytes = 0, self._update.held_bytes, None

    def _hook_of(self, place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self._update.release(keep_bytes=0)
                return
            self._before_block(place, [*args, *kwargs.values()])

        return hook

    def _before_block(self, place: int, inputs: Sequence[Any]) -> None:
        if self._calls >= self._num_calls:  # the step before was skipped, or failed
            self._calls, self._most_bytes = 0, None
            self._update.forget()
        self._calls += 1
        is_first = self._calls <= self._num_blocks
        # chunks beyond the staging leave their room to the activations of the first forward
        beyond = max(0, self._held_bytes - self._staging_bytes) if is_first else 0
        self._update.release(keep_bytes=self._staged(-1) + beyond * (self._num_blocks - 1 - place) // self._num_blocks)
        self._update.load_ahead(self._staged(1) - self._update.held_bytes)
        hidden = (one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad)
        first = next(hidden, None)
        if first is not None:
            first.register_hook(self._after_block)  # type: ignore[no-untyped-call]
        else:
            self._calls += 1

    def _after_block(self, _gradient: torch.Tensor) -> None:
        """The gradient of a block's input exists: its activations are freed."""
        self._calls += 1
        if self._calls <= self._num_calls - self._num_blocks:
            self._update.release(keep_bytes=self._staged(-1))
            self._update.load_ahead(self._staged(1) - self._update.held_bytes)
            return
        others = self._allocated() - self._update.held_bytes
        self._most_bytes = others if self._most_bytes is None else self._most_bytes
        room = max(0, self._most_bytes - others) + max(self._staged(1), 0)
        self._update.load_ahead(room - self._update.held_bytes)

    def _staged(self, sign: int) -> int:
        """Bytes that chunks may hold now besides the room of activations: fewer and fewer of those that leave (`sign`
        -1), which must be gone in the middle of the step, then more and more of those that come (1)."""
        middle = self._num_calls // 2
        return max(0, self._staging_bytes * sign * (self._calls - middle) // middle)
