"""`Schedule`: the order of the actions of every rank of a pipeline. A frozen value that parses back from text.

It holds no times (`simulate` computes them) and need not be legal (`check_schedule` checks that).
Placements: loop, stage s on rank s mod p; v, stages p .. 2p-1 come back down, stage s on rank 2p-1-s.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from weft.core.errors import BadValueError
from weft.schedule.actions import Action


class WeightRule(StrEnum):
    """The version of its weights that a stage reads for a micro-batch; version v has had v updates."""

    FLUSH = "flush"  # one version: the step ends, everything drains, then the optimizer runs outside the schedule
    STASH = "stash"  # the newest at its forward, and the same one again at its backward (PipeDream)
    VERTICAL_SYNC = "vertical_sync"  # on every stage the version that stage 0 read for that micro-batch
    DOUBLE_BUFFER = "double_buffer"  # one step behind: step t reads version max(t - 1, 0) (PipeDream-2BW)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`ranks[r]` are the actions of rank r, in order. Micro-batches are numbered through all `num_steps` steps."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int  # of one step
    stage_to_rank: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    num_steps: int = 1
    weight_rule: WeightRule = WeightRule.FLUSH

    @property
    def window(self) -> int:
        """Micro-batches in all steps together."""
        return self.num_microbatches * self.num_steps

    @property
    def is_synchronous(self) -> bool:
        return self.weight_rule is WeightRule.FLUSH

    @property
    def update_period(self) -> int:
        """Micro-batches between two updates inside the schedule; 0 where the optimizer runs outside it."""
        if self.is_synchronous:
            return 0
        return self.num_microbatches if self.weight_rule is WeightRule.DOUBLE_BUFFER else 1

    @cached_property
    def rank_to_stages(self) -> tuple[tuple[int, ...], ...]:
        stages = defaultdict(list)
        for stage, rank in enumerate(self.stage_to_rank):
            stages[rank].append(stage)
        return tuple(tuple(stages[rank]) for rank in range(self.num_ranks))

    def to_text(self) -> str:
        """A line of facts, then one line of comma-separated actions per rank."""
        facts = {
            "schedule": self.name,
            "ranks": self.num_ranks,
            "stages": self.num_stages,
            "microbatches": self.num_microbatches,
            "steps": self.num_steps,
            "weights": self.weight_rule.value,
            "placement": "-".join(map(str, self.stage_to_rank)),
        }
        header = " ".join(f"{key}={value}" for key, value in facts.items())
        return "\n".join([header, *(",".join(map(str, actions)) for actions in self.ranks)]) + "\n"

    @staticmethod
    def parse(text: str) -> Schedule:
        header, *rows = text.removesuffix("\n").split("\n")
        try:
            facts = dict(pair.split("=", 1) for pair in header.split())
            return Schedule(
                name=facts["schedule"],
                num_ranks=int(facts["ranks"]),
                num_stages=int(facts["stages"]),
                num_microbatches=int(facts["microbatches"]),
                num_steps=int(facts["steps"]),
                weight_rule=WeightRule(facts["weights"]),
                stage_to_rank=tuple(map(int, facts["placement"].split("-"))),
                ranks=tuple(tuple(map(Action.parse, row.split(","))) if row else () for row in rows),
            )
        except (KeyError, ValueError) as error:
            raise BadValueError(
                f"this is not a printed schedule: {error}",
                hint="Schedule.to_text() writes one: a line of key=value facts, then one line of actions per rank",
            ) from None


def loop_placement(*, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    return tuple(stage % num_ranks for stage in range(num_stages))


def v_placement(*, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Down the ranks and up again, once per leg; the two stages at a turn are on one rank."""
    down = tuple(range(num_ranks))
    legs = (down if leg % 2 == 0 else down[::-1] for leg in range(num_stages // num_ranks))
    return tuple(rank for leg in legs for rank in leg)
