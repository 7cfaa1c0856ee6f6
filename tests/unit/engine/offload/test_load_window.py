"""`LoadWindow` with events of given times: the link's rate limits what is loaded ahead of the next update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from weft.engine.offload.copy_streams import NoStreams
from weft.engine.offload.load_window import LoadWindow


@dataclass
class Stamp:
    at_ms: float
    is_done: bool = True

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, other: Stamp) -> float:
        return other.at_ms - self.at_ms


class Clock(NoStreams):
    """Gives the stamps of a list."""

    def __init__(self, *stamps: Stamp) -> None:
        self.stamps = list(stamps)

    def stamp(self, *, of_loads: bool) -> Any:
        return self.stamps.pop(0)


@pytest.mark.parametrize(("loads_end_ms", "limit"), [(40.0, 2500), (100.0, 1000), (200.0, 500)])
def test_the_next_step_loads_what_arrives_before_the_update(loads_end_ms: float, limit: int) -> None:
    window = LoadWindow(Clock(Stamp(0.0), Stamp(10.0), Stamp(loads_end_ms), Stamp(100.0)), first_bytes=1000)
    assert window.limit(10**6, loaded_bytes=400) == 600
    for _ in range(2):  # two loads: the first begins at 0
        window.begin_load()
        window.end_load()
    window.end(1000)
    assert window.limit(10**6, loaded_bytes=0) == limit
    assert window.limit(7, loaded_bytes=0) == 7


def test_a_step_that_the_device_has_not_finished_changes_nothing() -> None:
    running = Stamp(100.0, is_done=False)
    window = LoadWindow(Clock(Stamp(0.0), Stamp(50.0), running), first_bytes=1000)
    window.begin_load()
    window.end_load()
    window.end(1000)
    assert window.limit(10**6, loaded_bytes=0) == 1000
    running.is_done = True
    window.end(0)  # the next update: nothing was loaded ahead
    assert window.limit(10**6, loaded_bytes=0) == 2000


def test_a_cpu_has_no_limit() -> None:
    window = LoadWindow(NoStreams(), first_bytes=1000)
    window.begin_load()
    assert window.limit(10**6, loaded_bytes=5000) == 10**6
