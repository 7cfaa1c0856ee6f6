"""`PipelineSize` and `ScheduleSpec`: the input of a generator, and the declaration in a generator's file.

A generator is a pure function (size, rank) -> actions; `RankProgram` numbers the micro-batches for it.
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
class PipelineSize:
    """p ranks, m micro-batches per step, v stages per rank, over a number of steps."""

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


def no_further_rule(size: PipelineSize) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """`virtual_stages`: the minimum and the maximum of stages per rank (None: any number)."""

    name: str
    rank_actions: Callable[[PipelineSize, int], Iterable[Action]]
    placement: Literal["loop", "v"] = "loop"
    virtual_stages: tuple[int, int | None] = (1, 1)
    weight_rule: WeightRule = WeightRule.FLUSH
    check: Callable[[PipelineSize], list[str]] = no_further_rule  # further reasons


@dataclass
class RankProgram:
    """A rank's actions under construction: each (kind, stage) takes its micro-batches in order."""

    actions: list[Action] = field(default_factory=list)
    done: Counter[tuple[Kind, int]] = field(default_factory=Counter)

    def add(self, kind: Kind, stage: int) -> int:
        """Append the next micro-batch of `stage` for `kind`; returns its number."""
        microbatch = self.done[kind, stage]
        self.done[kind, stage] += 1
        self.actions.append(Action(kind, stage, microbatch))
        return microbatch
