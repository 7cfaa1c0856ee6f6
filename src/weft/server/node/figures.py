"""What a server counts of itself."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class Busy:
    """Seconds inside `with`; one thread at a time, who has the server's lock."""

    def __init__(self) -> None:
        self.total_s, self._since = 0.0, 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.total_s += time.perf_counter() - self._since


@dataclass
class Figures:
    started_s: float = field(default_factory=time.monotonic)
    pulled_rows: int = 0
    pushed_rows: int = 0
    pulls: int = 0
    pushes: int = 0
    repeated: int = 0  # pushes that had been applied before
    busy: Busy = field(default_factory=Busy)  # inside tables and the log
    waited_s: float = 0.0  # pulls in front of the gate
    staleness: Counter[int] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("staleness", "started_s", "busy")}
        histogram = {str(tau): count for tau, count in sorted(self.staleness.items())}
        return {**plain, "busy_s": self.busy.total_s, "up_s": time.monotonic() - self.started_s, "staleness": histogram}
