"""`Leases`: which worker does which unit. Pure: no sockets, no threads, the clock is given.

    units go out in order; a lost worker's units go out again first
    unit u goes out only when every step up to `gate` before its own is done, and never at or beyond `hold`

The gate is the servers' too. Here it keeps workers free: one that waited in front of a server could not take over the
very unit that everybody waits for. A unit that was done twice counts once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Leases:
    def __init__(
        self,
        *,
        shares: int,
        first: int,
        end: int,
        gate: int | None,
        lease_s: float,
        clock: Callable[[], float],
        is_static: bool = False,
    ) -> None:
        """`is_static`: a worker's rank is its share of every step (replicated parameters need all workers in each)."""
        self.shares, self.end, self.hold = shares, end, end
        self._gate, self._lease_s, self._clock = gate, lease_s, clock
        self._is_static = is_static
        self._next = {share: _first_of(share, first, shares) for share in range(shares)}
        self._returned: list[int] = []
        self.redone: set[int] = set()  # units that were leased to one who is gone, and may have come half-way
        self._holders: dict[int, str] = {}
        self._seen: dict[str, float] = {}  # workers and when they were last heard
        self._done_above: set[int] = set()
        self.done = first  # every unit below is done
        self.highest = first - 1  # leased so far
        self.began_s: float | None = None  # when the first unit went out

    @property
    def workers(self) -> list[str]:
        return sorted(self._seen)

    def beat(self, worker: str) -> None:
        self._seen[worker] = self._clock()

    def lease(self, worker: str, *, rank: int = 0, held: int = 0) -> int | None:
        """The worker's next unit; None: nothing may go out now. `held`: units that it did and has not settled.

        Who does a unit again settles before and after it: servers that have it already could not take it out of a sum.
        """
        self.beat(worker)
        unit = self._candidate(rank)
        if unit is None or not self._may_go(unit) or (held and unit in self.redone):
            return None
        if self._returned and unit == self._returned[0]:
            heapq.heappop(self._returned)
        else:
            self._next[unit % self.shares] += self.shares
        self._holders[unit] = worker
        self.began_s = self._clock() if self.began_s is None else self.began_s
        self.highest = max(self.highest, unit)
        return unit

    def finish(self, unit: int) -> bool:
        """Whether this was the first time the unit was done."""
        self._holders.pop(unit, None)
        if unit < self.done or unit in self._done_above:
            return False
        if unit in self._returned:  # its worker was thought lost, and was only slow
            self._returned.remove(unit)
            heapq.heapify(self._returned)
        self._done_above.add(unit)
        while self.done in self._done_above:
            self._done_above.remove(self.done)
            self.done += 1
        return True

    def drop(self, worker: str) -> list[int]:
        """The worker is gone; its units go out again."""
        self._seen.pop(worker, None)
        units = sorted(unit for unit, holder in self._holders.items() if holder == worker)
        for unit in units:
            del self._holders[unit]
            heapq.heappush(self._returned, unit)
        self.redone.update(units)
        return units

    def expire(self) -> list[str]:
        """Drops the workers that were silent for longer than a lease; returns them."""
        limit = self._clock() - self._lease_s
        silent = [worker for worker, seen in self._seen.items() if seen < limit]
        for worker in silent:
            self.drop(worker)
        return silent

    def _candidate(self, rank: int) -> int | None:
        if self._is_static:
            return self._next.get(rank)
        return min([*self._returned[:1], *self._next.values()])

    def _may_go(self, unit: int) -> bool:
        if unit >= min(self.hold, self.end):
            return False
        return self._gate is None or self.done >= (unit // self.shares - self._gate) * self.shares


def _first_of(share: int, first: int, shares: int) -> int:
    """The smallest unit of this share that is not below `first`."""
    return first + (share - first) % shares
