"""Marks in a step's course, on the clock of whoever does the work: the host's on a CPU, the device's on a GPU."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """`mark` between phases; `seconds` between consecutive marks, once the device has passed them all."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [_between(begin, end) for begin, end in zip(self._marks, self._marks[1:], strict=False)]


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1000
    raise TypeError("marks of two clocks")
