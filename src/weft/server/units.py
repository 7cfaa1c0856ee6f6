"""Units: step t of a run is `shares` units, t * shares ... t * shares + shares - 1. Pure: no sockets, no threads.

    step t takes positions t * global_batch ... of an endless order: epoch after epoch, each a fresh permutation
    share s of P takes the s-th of P nearly equal slices of its step, so the samples of a step do not depend on P
    units are leased in order; the units of a lost worker are leased again first
    unit u starts only when every step up to `gate` before its own is done, and never at or beyond `hold`

Servers check the gate in pulls. Leases check it too, so that no worker blocks in a pull while the unit that all others
wait for has no worker. A unit that was done twice counts once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.server_spec import ServerRun
from weft.data.order import permute


class UnitSet:
    """Numbers from 0 on: all below the watermark, and some above it."""

    def __init__(self, watermark: int = 0, above: Iterable[int] = ()) -> None:
        self.watermark = watermark  # the first number that is missing
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


def passes_gate(unit: int, *, done: int, shares: int, gate: int | None) -> bool:
    """Whether a unit may start when all units below `done` are done: `gate` steps ahead at most; None: any time."""
    return gate is None or done >= (unit // shares - gate) * shares


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    num_train: int
    global_batch: int
    shares: int
    seed: int

    def indices(self, unit: int) -> NDArray[np.int64]:
        """The samples of a unit: a function of (seed, unit) alone."""
        step, share = divmod(unit, self.shares)
        start = step * self.global_batch
        first = start + share * self.global_batch // self.shares
        stop = start + (share + 1) * self.global_batch // self.shares
        epochs, places = np.divmod(np.arange(first, stop, dtype=np.int64), self.num_train)
        return permute(places, size=self.num_train, seed=self.seed, epoch=epochs)


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """The report of a worker on a finished unit."""

    unit: int
    loss_sum: float
    weight: float  # samples
    compute_s: float
    wait_s: float
    staleness: tuple[int, ...] = ()  # on each server

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Leases:
    """The worker of each unit. The clock is an argument."""

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
        """`is_static`: the rank of a worker is its share of every step (replicated parameters need all workers)."""
        self.shares, self.end, self.hold = shares, end, end
        self._gate, self._lease_s, self._clock = gate, lease_s, clock
        self._is_static = is_static
        self._next = {share: first + (share - first) % shares for share in range(shares)}  # not leased yet
        self._returned: list[int] = []
        self.redone: set[int] = set()  # units of lost workers; some servers may have their pushes
        self._holders: dict[int, str] = {}
        self._seen: dict[str, float] = {}  # time of the last message of each worker
        self._finished = UnitSet(first)
        self.highest = first - 1  # leased so far
        self.began_s: float | None = None  # time of the first lease

    @property
    def done(self) -> int:
        """Every unit below is done."""
        return self._finished.watermark

    @property
    def workers(self) -> list[str]:
        return sorted(self._seen)

    def beat(self, worker: str) -> None:
        self._seen[worker] = self._clock()

    def lease(self, worker: str, *, rank: int = 0, held: int = 0) -> int | None:
        """The next unit of a worker; None if no unit may start now. `held`: finished units that it has not flushed.

        A worker flushes before and after it repeats a unit: servers that have the unit could not remove it from a sum.
        """
        self.beat(worker)
        unit = self._candidate(rank)
        if unit is None or not self._may_start(unit) or (held and unit in self.redone):
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
        """Whether the unit was finished for the first time."""
        self._holders.pop(unit, None)
        if unit in self._finished:
            return False
        if unit in self._returned:  # its worker was declared lost, and was only slow
            self._returned.remove(unit)
            heapq.heapify(self._returned)
        self._finished.add(unit)
        return True

    def drop(self, worker: str) -> list[int]:
        """Lease the units of a lost worker again; returns them."""
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

    def _may_start(self, unit: int) -> bool:
        is_open = passes_gate(unit, done=self.done, shares=self.shares, gate=self._gate)
        return is_open and unit < min(self.hold, self.end)


class Boundaries:
    """The steps after which a run pauses: evaluations, snapshots, the end."""

    def __init__(self, run: ServerRun) -> None:
        self._evaluate_every = run.evaluation.every
        self._snapshot_every = run.checkpoint.every
        self._full_every = run.checkpoint.full_every
        self._steps = run.train.steps

    def after(self, step: int) -> int:
        """The first boundary above this step."""
        every = [period for period in (self._evaluate_every, self._snapshot_every) if period]
        return min([self._steps, *((step // period + 1) * period for period in every)])

    def is_evaluation(self, step: int) -> bool:
        return bool(self._evaluate_every) and step % self._evaluate_every == 0

    def is_snapshot(self, step: int) -> bool:
        return bool(self._snapshot_every) and step % self._snapshot_every == 0

    def is_shrink(self, step: int) -> bool:
        """Planned boundaries only: a stopped run would otherwise continue from other rows than an uninterrupted one."""
        return self.is_snapshot(step) or step == self._steps

    def is_full(self, step: int) -> bool:
        """The first snapshot, and every `full_every`-th after it."""
        return (step // max(1, self._snapshot_every) - 1) % self._full_every == 0
