"""Marks of a runner as seconds: the host's own on a CPU, a device's events on the host's clock."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch

from weft.engine.pp.action_times import ActionClock, ActionTimes
from weft.schedule import Action, Kind

ACTION = Action(Kind.F, 0, 0)


def test_a_step_that_nobody_watches_has_no_times() -> None:
    record = ActionTimes()
    record.note(ACTION, record.now(), record.now())
    assert record.rows() == []


def test_marks_on_a_cpu_are_the_hosts_seconds() -> None:
    record = ActionTimes(clock=ActionClock(torch.device("cpu")))
    before_s = time.perf_counter()
    record.note(ACTION, record.now(), record.now())
    [row] = record.rows()
    assert row.action == ACTION
    assert before_s <= row.asked_s <= row.start_s <= row.end_s <= time.perf_counter()


class FakeEvent:
    """A device whose clock has its own zero, 100 ms further with every event."""

    made: ClassVar[list[FakeEvent]] = []
    waits = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = 7000.0 + 100 * len(self.made)
        self.made.append(self)

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_marks_on_a_device_wait_for_nothing_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_: Any) -> None:
        pass

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: 50.0)
    record = ActionTimes(clock=ActionClock(torch.device("cuda")))
    waits = FakeEvent.waits
    record.note(ACTION, record.now(), record.now())
    assert FakeEvent.waits == waits
    [row] = record.rows()
    assert row[1:] == pytest.approx((50.1, 50.2, 50.3))
    assert FakeEvent.waits == waits + 3
