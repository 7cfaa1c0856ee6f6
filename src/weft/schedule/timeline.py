"""`Timeline`: start and end of every action of a schedule, simulated or measured, and the bubble that follows.

bubble share = (makespan x ranks - busy) / (makespan x ranks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.schedule.actions import Action
from weft.schedule.schedule import Schedule


class TimedAction(NamedTuple):
    """An action with its rank and its times."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """`starts[r][i]` and `ends[r][i]` belong to `schedule.ranks[r][i]`."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    def events(self) -> Iterator[TimedAction]:
        """All actions, rank by rank, each in its order."""
        for rank in range(self.schedule.num_ranks):
            yield from self.events_of(rank)

    def events_of(self, rank: int) -> Iterator[TimedAction]:
        times = zip(self.schedule.ranks[rank], self.starts[rank], self.ends[rank], strict=True)
        return (TimedAction(rank, action, start, end) for action, start, end in times)

    @cached_property
    def origin_s(self) -> float:
        """When the first action starts; a measured clock does not begin at 0."""
        return min((starts[0] for starts in self.starts if starts), default=0)

    @cached_property
    def makespan_s(self) -> float:
        return max((max(ends) for ends in self.ends if ends), default=0) - self.origin_s

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Busy time per rank."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble_share_by_rank(self) -> tuple[float, ...]:
        return tuple(1 - busy / self.makespan_s for busy in self.busy_s)

    @property
    def bubble_share(self) -> float:
        return self.idle_s / (self.makespan_s * len(self.busy_s))

    @property
    def idle_s(self) -> float:
        """Idle time, summed over all ranks."""
        return self.makespan_s * len(self.busy_s) - sum(self.busy_s)
