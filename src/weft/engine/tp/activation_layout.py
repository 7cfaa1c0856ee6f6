"""How the activations at hand are cut, for those who must know: dropout draws the whole mask and takes its own part.

    whole     every rank has all of it (before the first block, after the last; in between, without sequence parallel)
    stream    sequence parallel: [rows, own slice of the sequence, hidden]
    inside    in a region: heads of [rows, heads, …], or the last dimension of [rows, sequence, width]

A forward walks through the activations; layers around modules say where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from weft.core.errors import NotBuiltError

Layout = Literal["whole", "stream", "inside"]


@dataclass(kw_only=True)
class ActivationLayout:
    """Where the forward is now, on the rank at `place` of `degree`."""

    place: int
    degree: int
    sequence_parallel: bool
    now: Layout = field(default="whole")

    def enter(self) -> None:
        self.now = "inside"

    def leave(self) -> None:
        self.now = "stream" if self.sequence_parallel else "whole"

    def begin(self) -> None:
        """The first block takes its slice of the stream."""
        self.leave()

    def end(self) -> None:
        self.now = "whole"

    def cut_dim(self, tensor: torch.Tensor) -> int | None:
        """The dimension along which `tensor` is a slice, if it is one."""
        if self.now == "whole":
            return None
        if self.now == "stream":
            if tensor.ndim < 3:
                raise NotBuiltError(
                    "dropout on flattened tokens cannot be drawn alike with sequence parallel",
                    hint="set tensor_parallel.sequence_parallel = false, or the model's dropout to 0",
                )
            return 1
        return 1 if tensor.ndim == 4 else tensor.ndim - 1

    def whole_shape(self, tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
        shape = list(tensor.shape)
        shape[dim] *= self.degree
        return tuple(shape)

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        size = whole.shape[dim] // self.degree
        return whole.narrow(dim, self.place * size, size)
