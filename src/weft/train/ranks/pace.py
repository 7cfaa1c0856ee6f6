"""How long each rank works in a step and how long it waits for others: the rank that the others wait for is named.

A thread looks 20 times a second whether the main thread waits: for a message, or asleep with a collective that is not
complete. A collective in flight beside work counts as work. The shares are exact enough for steps of any length, since
they are sums over seconds, and nothing is added to a step. On CPUs only: on a GPU the device waits, not the host.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.comm.flight import is_pending
from weft.comm.messages import awaited
from weft.train.ranks.progress import progress

_LOOK_S = 0.05
_FEWEST = 40  # looks, below which a share says nothing
_SLOWER = 1.5  # than the others' median: named
_SIGMAS = 3.0  # a difference of shares that looks at equal ranks do not show by chance


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """Looks at a rank's main thread inside steps since the start: in how many of them it waited."""

    rank: int
    host: str
    looks: int
    waits: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankPace:
        return cls(**json.loads(text))

    @property
    def work_share(self) -> float:
        return 1.0 - self.waits / self.looks

    def since(self, earlier: RankPace | None) -> RankPace:
        if earlier is None:
            return self
        looks, waits = self.looks - earlier.looks, self.waits - earlier.waits
        return RankPace(rank=self.rank, host=self.host, looks=looks, waits=waits)


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank whose own work takes longer than that of the others, who wait for it."""

    rank: int
    host: str
    work_s: float  # per step
    others_s: float  # the median of the others

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}) makes the others wait: it works {self.work_s:.3g} s of a step,"
            f" they {self.others_s:.3g} s (median)"
        )


def slow_rank(paces: Iterable[RankPace], *, step_s: float) -> SlowRank | None:
    """The rank that the others wait for; None if all work about equally long, or too little is known."""
    known = sorted((pace for pace in paces if pace.looks >= _FEWEST), key=lambda pace: pace.work_share)
    if len(known) < 2:
        return None
    *others, slowest = known
    usual = statistics.median(pace.work_share for pace in others)
    by_chance = math.sqrt(usual * (1.0 - usual) * 2 / min(pace.looks for pace in known))
    if slowest.work_share < max(_SLOWER * usual, usual + _SIGMAS * by_chance):
        return None
    return SlowRank(rank=slowest.rank, host=slowest.host, work_s=slowest.work_share * step_s, others_s=usual * step_s)


class PaceLooks:
    """This rank's own looks; `count` is called by the thread, or by a test."""

    def __init__(self) -> None:
        self.looks = self.waits = 0
        self._stopped = threading.Event()
        self._state_file = Path(f"/proc/self/task/{os.getpid()}/stat")  # the main thread's number
        self._thread = threading.Thread(target=self._run, name="rank-pace", daemon=True)

    def start(self) -> None:
        if sys.platform == "linux":
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def count(self) -> None:
        if progress.is_slow:
            return
        self.looks += 1
        self.waits += awaited() is not None or (self._is_asleep() and is_pending())

    def _is_asleep(self) -> bool:
        return self._state_file.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self.count()


class Paces:
    """The paces of all ranks since the last time they were taken."""

    def __init__(self) -> None:
        self._newest: dict[int, RankPace] = {}
        self._taken: dict[int, RankPace] = {}

    def put(self, paces: Sequence[RankPace]) -> None:
        self._newest = {pace.rank: pace for pace in paces}

    def whole_run(self) -> list[RankPace]:
        return list(self._newest.values())

    def take(self) -> list[RankPace]:
        """Since the last `take` that returned something; [] until enough is known."""
        newest = self._newest
        found = [pace.since(self._taken.get(pace.rank)) for pace in newest.values()]
        if not found or min(pace.looks for pace in found) < _FEWEST:
            return []
        self._taken = newest
        return found
