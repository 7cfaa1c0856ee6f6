"""A step that was issued, and may not be finished on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weft.core.records import StepRecord
from weft.engine.measure.host_copy import HostCopy
from weft.engine.measure.timer import StepTimer
from weft.engine.router.totals import RouterTotals


@dataclass(kw_only=True, eq=False)
class PendingStep:
    """A step whose numbers may not be computed yet; `resolve` waits for them."""

    step: int
    learning_rate: float
    values: torch.Tensor  # loss, gradient norm, weight, votes to stop, sums of the figures
    figures: tuple[str, ...] = ()  # names, of the objective
    work: dist.Work | None = None  # the sum over all ranks in flight, with the norm squared
    timer: StepTimer  # forward, backward, optimizer
    skipped: bool
    loss_scale: float | None
    router: RouterTotals | None = None  # of a mixture of experts
    float8: dict[str, Any] = field(default_factory=dict)  # figures of a measured step

    def __post_init__(self) -> None:
        self._copied = HostCopy(self.values) if self.work is None else None

    def resolve(self) -> tuple[StepRecord, bool]:
        """The record, and whether any rank voted to stop."""
        if self.work is not None:
            self.work.wait()
        numbers = self._copied.wait() if self._copied is not None else self.values
        loss, norm, weight, votes, *sums = numbers.tolist()
        figures = dict(zip(self.figures, sums, strict=True))
        tokens = figures.pop("tokens", weight)
        seconds = sum(self.timer.seconds().values())
        record = StepRecord(
            step=self.step,
            loss=loss,
            grad_norm=math.sqrt(norm) if self.work is not None else norm,
            tokens=int(tokens),
            learning_rate=self.learning_rate,
            step_s=seconds,
            tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
            skipped=self.skipped,
            loss_scale=self.loss_scale,
            figures={name: value / max(weight, 1.0) for name, value in figures.items()} or None,
            **(self.router.figures() if self.router is not None else {}),
            **self.float8,
        )
        return record, votes > 0
