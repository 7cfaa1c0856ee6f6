"""How the current activations are sharded: dropout draws the full mask and takes the rank's slice.

    full      replicated (before the first block, after the last; in between, without sequence parallel)
    stream    sequence parallel: [rows, local slice of the sequence, hidden]
    inside    in a region: heads of [rows, heads, …], or the last dimension of [rows, sequence, width]

Layers around modules record the layout as a forward passes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from weft.core.errors import NotBuiltError
from weft.engine.activations.slices import AttentionSlices, EvenSlice, Sliced

Layout = Literal["full", "stream", "inside"]


@dataclass(kw_only=True)
class ActivationLayout:
    """The layout at the current point of the forward, on the rank at `place` of `degree`."""

    place: int
    degree: int
    sequence_parallel: bool
    now: Layout = field(default="full")
    is_attending: ClassVar[bool] = False  # a region exchanges nothing at its attention

    def enter(self) -> None:
        self.now = "inside"

    def leave(self) -> None:
        self.now = "stream" if self.sequence_parallel else "full"

    def begin(self) -> None:
        """At the first block, which takes its slice of the stream."""
        self.leave()

    def end(self) -> None:
        self.now = "full"

    def of(self, shape: Sequence[int]) -> Sequence[Sliced]:
        dim = self.shard_dim(shape)
        if dim == 2 and len(shape) == 3 and shape[0] > 1:
            dim = 0  # XGLM flattens rows and heads: the heads are sharded
        return [(dim, self._slice)] if dim is not None else []

    def in_attention(self, shape: Sequence[int]) -> AttentionSlices:
        return AttentionSlices(heads=(self._slice,) if self.of(shape) else ())

    def snapshot(self) -> ActivationLayout:
        return replace(self)

    def shard_dim(self, shape: Sequence[int]) -> int | None:
        """The dimension along which the tensor of one row is sharded; None for a full tensor."""
        if self.now == "full":
            return None
        if self.now == "stream":
            return 1 if len(shape) > 2 else _tokens_dim(shape)
        return 1 if len(shape) == 4 else len(shape) - 1

    @property
    def _slice(self) -> EvenSlice:
        return EvenSlice(self.place, self.degree)


def _tokens_dim(shape: Sequence[int]) -> int:
    """Of flattened tokens."""
    if shape[0] == 1:
        raise NotBuiltError(
            f"dropout on a tensor of shape {tuple(shape)} per row would draw other masks with sequence parallel",
            hint="set tensor_parallel.sequence_parallel = false, or the model's dropout to 0",
        )
    return 0
