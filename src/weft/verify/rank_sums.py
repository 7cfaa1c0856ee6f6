"""Gradients of the ranks of a plan in the one-process reference, rounded on their way as the plan rounds them.

Blocks of codes are those of a parameter here and of a rank's share there, so the rounding is alike, not equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.verify.plain_codes import rounded_like
from weft.verify.run_trace import ReferencePrecision, Tensors


class RankSums:
    """The sum of the gradients of ranks, rounded on their way as `precision` says; a no-op in float32."""

    def __init__(self, trainable: Mapping[str, nn.Parameter], precision: ReferencePrecision) -> None:
        self._trainable, self._precision = trainable, precision
        self._totals: Tensors = {}
        self.exact: Tensors = {}
        self._chunks = 0
        self._lost: Tensors = {}  # by place in a step and name

    def begin_step(self) -> None:
        self._totals, self.exact, self._chunks = {}, {}, 0

    def finish_chunk(self) -> None:
        self._chunks += 1
        if self._precision.reduce != "float32" and self._chunks % self._precision.chunks_per_sum == 0:
            self._send()

    def _send(self) -> None:
        for name, gradient in self._gradients():
            arrived = self._arrived(f"{self._chunks} {name}", gradient)
            for kept, values in ((self._totals, arrived), (self.exact, gradient)):
                kept[name] = kept[name] + values if name in kept else values
            self._trainable[name].grad = None

    def finish(self) -> None:
        for name, total in self._totals.items():
            is_rounded = self._precision.rounds_sums
            self._trainable[name].grad = self._arrived(f"sum {name}", total) if is_rounded else total

    def _arrived(self, place: str, values: torch.Tensor) -> torch.Tensor:
        if not self._precision.feeds_back:
            return rounded_like(values, self._precision.reduce)
        given = values + self._lost[place] if place in self._lost else values
        arrived = rounded_like(given, self._precision.reduce)
        self._lost[place] = given - arrived
        return arrived

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, master.grad) for name, master in self._trainable.items() if master.grad is not None]
