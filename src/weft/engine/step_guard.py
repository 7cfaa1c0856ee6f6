"""`StepGuard`: whether the update of a step is made, decided before it, alike on every rank.

A step is bad if its loss or its gradient norm is not finite, or if its loss is above `spike_factor` times the median of
the losses of the last good steps. The decision reads one all-reduce on the host, so a GPU does not run ahead of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.comm.groups import sum_over
from weft.engine.buffers.changes import BufferSnapshot

if TYPE_CHECKING:
    from weft.engine.engine import Engine

MIN_LOSSES = 8  # a median of fewer is no measure of a spike


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A step whose update was not made."""

    step: int
    loss: float
    grad_norm: float
    reason: str


class NoGuard:
    """Every update is made."""

    def see_loss(self, loss_sum: Tensor, weights: Tensor) -> None:
        """This rank's summed loss of the step, and the weights of all ranks."""

    def refuses(self, norm: Tensor) -> bool:
        """Whether the update is not to be made. Collective."""
        return False


class StepGuard(NoGuard):
    """Of one engine, which asks it before each update; `begin` comes before each step."""

    def __init__(self, engine: Engine, *, spike_factor: float, window: int) -> None:
        self._engine, self._factor = engine, spike_factor
        self.losses: deque[float] = deque(maxlen=window)  # of the last good steps
        self.found: BadStep | None = None  # in the step that began last

    def begin(self) -> None:
        engine = self._engine
        self.found = None
        self._buffers = BufferSnapshot(engine.buffer_sync.changes, range(len(engine.buffer_sync.changes.slots)))
        self._router: dict[str, Any] = engine.routers.scalars()

    def see_loss(self, loss_sum: Tensor, weights: Tensor) -> None:
        self._sum, self._weight = loss_sum, weights.sum()

    def refuses(self, norm: Tensor) -> bool:
        engine = self._engine
        # an overflow of scaled gradients is the loss scale's to handle
        is_bad_norm = torch.zeros_like(self._sum) if engine.loss_scale.enabled else 1.0 - norm.isfinite().to(self._sum)
        own = torch.stack([self._sum * engine.axes.owns_loss, is_bad_norm.to(self._sum.device)])
        loss_sum, bad_norms = sum_over(own, None).tolist()
        loss = loss_sum / max(float(self._weight), 1.0)
        if reason := self._reason(loss, has_bad_norm=bad_norms != 0):
            self.found = BadStep(step=engine.steps_done + 1, loss=loss, grad_norm=float(norm), reason=reason)
            return True
        self.losses.append(loss)
        return False

    def undo(self) -> None:
        """After a bad step: buffers and counts of routers are those before it, as weights and moments are."""
        self._buffers.restore()
        self._engine.buffer_sync.synchronise()
        self._engine.routers.restore(self._router)

    def _reason(self, loss: float, *, has_bad_norm: bool) -> str:
        if not math.isfinite(loss):
            return "the loss is not finite"
        if has_bad_norm:
            return "the gradient norm is not finite"
        if not self._factor or len(self.losses) < min(MIN_LOSSES, self.losses.maxlen or MIN_LOSSES):
            return ""
        median = statistics.median(self.losses)
        if loss <= self._factor * median:
            return ""
        return (
            f"the loss {loss:.4f} is above {self._factor:g} times {median:.4f}, the median of {len(self.losses)} steps"
        )
