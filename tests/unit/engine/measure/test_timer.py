"""Seconds of a step: by term, from its own begin, and from the end of the step before."""

from __future__ import annotations

import pytest
import torch

from weft.core.terms import TimeTerm
from weft.engine.measure import timer
from weft.engine.measure.timer import StepTimer


def test_seconds_of_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(timer, "now", lambda _device: next(clock))
    first = StepTimer(torch.device("cpu"))
    first.mark(TimeTerm.FORWARD)
    first.mark(TimeTerm.OPTIMIZER)
    second = StepTimer(torch.device("cpu"))
    second.mark(TimeTerm.FORWARD_BACKWARD)
    assert first.seconds() == {TimeTerm.FORWARD: 2.0, TimeTerm.OPTIMIZER: 1.0}
    assert (first.seconds_since(None), second.seconds_since(None), second.seconds_since(first)) == (3.0, 4.0, 11.0)
