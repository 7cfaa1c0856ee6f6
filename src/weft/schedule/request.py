"""`Request` and `ScheduleSpec`: what a generator is given, and what a generator's file declares about itself.

A generator is a pure function (request, rank) -> actions; `RankProgram` numbers the micro-batches for it.
To add a schedule: one file in `generators` with a SPEC, its line in `registry`, its name in `core.plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from weft.schedule.actions import Action, Kind
from weft.schedule.schedule import WeightRule


@dataclass(frozen=True, kw_only=True)
class Request:
    """The size of a pipeline: p ranks, m micro-batches a step, v stages a rank, over a number of steps."""

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 1
    num_steps: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.virtual_stages

    @property
    def window(self) -> int:
        return self.num_microbatches * self.num_steps


def no_further_rule(request: Request) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """`virtual_stages` is the least and the most a rank may hold (None: any number)."""

    name: str
    rank_actions: Callable[[Request, int], Iterable[Action]]
    placement: Literal["loop", "v"] = "loop"
    virtual_stages: tuple[int, int | None] = (1, 1)
    weight_rule: WeightRule = WeightRule.FLUSH
    check: Callable[[Request], list[str]] = no_further_rule  # reasons beyond the counts above


@dataclass
class RankProgram:
    """A rank's actions under construction: each (kind, stage) takes its micro-batches in order."""

    actions: list[Action] = field(default_factory=list)
    done: Counter[tuple[Kind, int]] = field(default_factory=Counter)

    def add(self, kind: Kind, stage: int) -> int:
        """The next micro-batch of `stage` for `kind`; its number."""
        microbatch = self.done[kind, stage]
        self.done[kind, stage] += 1
        self.actions.append(Action(kind, stage, microbatch))
        return microbatch
