"""How the current activations are sharded: dropout draws the full mask and takes the rank's slice.

    full      replicated (before the first block, after the last; in between, without sequence parallel)
    stream    sequence parallel: [rows, local slice of the sequence, hidden]
    inside    in a region: heads of [rows, heads, …], or the last dimension of [rows, sequence, width]

Layers around modules record the layout as a forward passes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from weft.core.errors import NotBuiltError

Layout = Literal["full", "stream", "inside"]


@dataclass(kw_only=True)
class ActivationLayout:
    """The layout at the current point of the forward, on the rank at `place` of `degree`."""

    place: int
    degree: int
    sequence_parallel: bool
    now: Layout = field(default="full")

    def enter(self) -> None:
        self.now = "inside"

    def leave(self) -> None:
        self.now = "stream" if self.sequence_parallel else "full"

    def begin(self) -> None:
        """At the first block, which takes its slice of the stream."""
        self.leave()

    def end(self) -> None:
        self.now = "full"

    def shard_dim(self, tensor: torch.Tensor) -> int | None:
        """The dimension along which `tensor` is sharded; None for a full tensor."""
        if self.now == "full":
            return None
        if self.now == "stream":
            if tensor.ndim < 3:
                raise NotBuiltError(
                    "dropout on flattened tokens would draw other masks with sequence parallel",
                    hint="set tensor_parallel.sequence_parallel = false, or the model's dropout to 0",
                )
            return 1
        return 1 if tensor.ndim == 4 else tensor.ndim - 1

    def full_shape(self, tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
        shape = list(tensor.shape)
        shape[dim] *= self.degree
        return tuple(shape)

    def local_slice(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        size = full.shape[dim] // self.degree
        return full.narrow(dim, self.place * size, size)
