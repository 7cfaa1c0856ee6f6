"""What a server counts of itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Figures:
    started_s: float = field(default_factory=time.monotonic)
    pulled_rows: int = 0
    pushed_rows: int = 0
    pulls: int = 0
    pushes: int = 0
    repeated: int = 0  # pushes that had been applied before
    busy_s: float = 0.0  # inside tables and the log
    waited_s: float = 0.0  # pulls in front of the gate
    staleness: Counter[int] = field(default_factory=Counter)

    @contextmanager
    def busy(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.busy_s += time.perf_counter() - start

    def as_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("staleness", "started_s")}
        histogram = {str(tau): count for tau, count in sorted(self.staleness.items())}
        return {**plain, "up_s": time.monotonic() - self.started_s, "staleness": histogram}
