"""The times of a rank's actions: three marks per action.

    asked -> start     waiting for its message: bubble, or the message's transfer
    start -> end       computing
    end -> next asked  sending its result

Marks are the host's seconds on a CPU and device events on a GPU, so nothing waits inside a step; `rows` converts both
to seconds after it. They are seconds of `time.perf_counter` of this host: clocks of other hosts are not comparable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from weft.engine.measure.timer import Mark, record_event
from weft.schedule import Action


class ActionRow(NamedTuple):
    """One action and its three times, in seconds."""

    action: Action
    asked_s: float
    start_s: float
    end_s: float


class ActionClock:
    """Takes marks and reads them. Create it between two steps: it compares the device's clock with the host's once."""

    def __init__(self, device: torch.device) -> None:
        self._zero: torch.cuda.Event | None = None
        self._zero_s = 0.0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._zero = record_event()
            self._zero.synchronize()
            self._zero_s = time.perf_counter()

    def now(self) -> Mark:
        return time.perf_counter() if self._zero is None else record_event()

    def seconds(self, mark: Mark) -> float:
        """Waits until the device has reached the mark."""
        if self._zero is None or not isinstance(mark, torch.cuda.Event):
            return float(mark)  # type: ignore[arg-type]
        mark.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(mark)) / 1000


@dataclass(kw_only=True)
class ActionTimes:
    """A step of this rank: the most micro-batches in flight per stage and, if watched, the times of actions."""

    most_in_flight: dict[int, int] = field(default_factory=dict)
    clock: ActionClock | None = None
    marks: list[tuple[Action, Mark, Mark, Mark]] = field(default_factory=list)

    @staticmethod
    def joined(records: Sequence[ActionTimes]) -> ActionTimes:
        """Consecutive steps as one."""
        held = [record.most_in_flight for record in records]
        return ActionTimes(
            most_in_flight={
                stage: max(one.get(stage, 0) for one in held) for stage in {s for one in held for s in one}
            },
            clock=records[0].clock,
            marks=[mark for record in records for mark in record.marks],
        )

    def now(self) -> Mark:
        return self.clock.now() if self.clock is not None else 0.0

    def note(self, action: Action, asked: Mark, start: Mark) -> None:
        if self.clock is not None:
            self.marks.append((action, asked, start, self.clock.now()))

    def rows(self) -> list[ActionRow]:
        """In the order in which the actions ran; empty if the step was not watched."""
        clock = self.clock
        if clock is None:
            return []
        return [ActionRow(action, *map(clock.seconds, marks)) for action, *marks in self.marks]
