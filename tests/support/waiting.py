"""Waiting for something to become true, with a limit that only a broken feature meets."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("gave up waiting")
        time.sleep(0.02)
