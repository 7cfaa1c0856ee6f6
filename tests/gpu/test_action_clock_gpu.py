"""A pipeline's marks on a real GPU: device events, read on the host's clock. Run by hand."""

from __future__ import annotations

import time

import pytest
import torch

from weft.engine.pp.action_times import ActionClock, ActionTimes
from weft.schedule import Action, Kind

pytestmark = pytest.mark.gpu


def test_marks_are_when_the_device_worked_and_not_when_it_was_told_to() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.randn(8192, 8192, device=device)
    record = ActionTimes(clock=ActionClock(device))
    began_s = time.perf_counter()
    asked, start = record.now(), record.now()
    for _ in range(20):
        matrix = (matrix @ matrix).clamp_(-1, 1)
    record.note(Action(Kind.F, 0, 0), asked, start)
    told_s = time.perf_counter() - began_s
    torch.cuda.synchronize(device)
    took_s = time.perf_counter() - began_s
    [row] = record.rows()
    assert told_s < took_s / 2  # nothing waited
    assert row.end_s - row.start_s == pytest.approx(took_s, rel=0.2)
    assert row.start_s == pytest.approx(began_s, abs=0.2 * took_s)
