"""Which units or sequence numbers were applied: everything below a watermark, and a set above it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Applied:
    def __init__(self, watermark: int = 0, above: Iterable[int] = ()) -> None:
        self.watermark = watermark  # the first that was not applied
        self._above = set(above)

    def __contains__(self, number: int) -> bool:
        return number < self.watermark or number in self._above

    def __len__(self) -> int:
        return self.watermark + len(self._above)

    def add(self, number: int) -> None:
        self._above.add(number)
        while self.watermark in self._above:
            self._above.remove(self.watermark)
            self.watermark += 1

    def as_dict(self) -> dict[str, Any]:
        return {"watermark": self.watermark, "above": sorted(self._above)}
