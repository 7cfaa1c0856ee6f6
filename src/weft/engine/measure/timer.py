"""Time marks within a step: the host's clock on a CPU, device events on a GPU."""

from __future__ import annotations

import time

import torch

from weft.core.terms import TimeTerm

Mark = float | torch.cuda.Event


class StepTimer:
    """`mark(term)` ends an interval spent on `term`; `seconds` by term, once the device has passed all marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[TimeTerm | None, Mark]] = [(None, now(device))]

    def mark(self, term: TimeTerm) -> None:
        self._marks.append((term, now(self._device)))

    def seconds_since(self, earlier: StepTimer | None) -> float:
        """From the end of an earlier step, or from the begin of this one, to the end of this one."""
        begin = self._marks[0] if earlier is None else earlier._marks[-1]
        return seconds_between(begin[1], self._marks[-1][1])

    def seconds(self) -> dict[TimeTerm, float]:
        found: dict[TimeTerm, float] = {}
        for (_, begin), (term, end) in zip(self._marks, self._marks[1:], strict=False):
            if term is not None:
                found[term] = found.get(term, 0.0) + seconds_between(begin, end)
        return found


def now(device: torch.device) -> Mark:
    return record_event() if device.type == "cuda" else time.perf_counter()


def record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Call after the device has passed both."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1000
    raise TypeError("the two marks come from different clocks")
