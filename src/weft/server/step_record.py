"""`ServerStepRecord`: one step of a run on parameter servers, a line of metrics.jsonl; and the book that makes them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from weft.server.coordinator import UnitReport


@dataclass(frozen=True, kw_only=True)
class ServerStepRecord:
    step: int  # 1 for the first
    loss: float  # mean over the step's samples, each as its worker saw it
    samples: int
    step_s: float  # since the step before was complete
    samples_per_s: float
    learning_rate: float  # of the embedding rows
    staleness_mean: float  # units that servers applied between a pull and its push
    wait_s: float  # mean over the units: for work, rows and acknowledgements
    eval_loss: float | None = None
    auc: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fields that are not there are left out; a number that is not finite is null, since JSON has no infinity."""
        present = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: None if _is_not_finite(value) else value for key, value in present.items()}

    @staticmethod
    def from_dict(given: dict[str, Any]) -> ServerStepRecord:
        known = {field.name for field in fields(ServerStepRecord)}
        values = {key: value for key, value in given.items() if key in known}
        return ServerStepRecord(**{**values, "loss": math.nan if values.get("loss") is None else values["loss"]})


class StepBook:
    """Collects units; gives the records of steps that are complete, in order."""

    def __init__(self, *, shares: int, first_unit: int, learning_rate: float, now: float) -> None:
        self._shares, self._learning_rate = shares, learning_rate
        self._step = first_unit // shares  # the next to be written, from 0
        self._units: dict[int, list[UnitReport]] = {}
        self._has_begun = False
        self._since = now

    def start_time(self, began: float | None) -> None:
        """Training began with the first unit, not with the processes."""
        if began is not None and not self._has_begun:
            self._has_begun, self._since = True, began

    def add(self, report: UnitReport) -> None:
        self._units.setdefault(report.unit // self._shares, []).append(report)

    def skip_time(self, now: float) -> None:
        """What passed until now was not training."""
        self._since = now

    def complete(self, *, done: int, now: float) -> list[ServerStepRecord]:
        """Records of the steps below the watermark `done`."""
        steps = range(self._step, done // self._shares)
        step_s = max(1e-9, (now - self._since) / max(1, len(steps)))
        records = [self._record(step, step_s) for step in steps]
        if records:
            self._step, self._since = steps.stop, now
        return records

    def _record(self, step: int, step_s: float) -> ServerStepRecord:
        units = self._units.pop(step, [])
        weight = sum(unit.weight for unit in units)
        staleness = [tau for unit in units for tau in unit.staleness]
        return ServerStepRecord(
            step=step + 1,
            loss=sum(unit.loss_sum for unit in units) / weight if weight else math.nan,
            samples=int(weight),
            step_s=step_s,
            samples_per_s=weight / step_s,
            learning_rate=self._learning_rate,
            staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
            wait_s=sum(unit.wait_s for unit in units) / max(1, len(units)),
        )


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
