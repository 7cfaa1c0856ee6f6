"""A schedule that never drains, split into calls: call t has the forwards of step t and all up to those of the next.

    rank 0 of 2, two micro-batches per step  0F0 0F1 0B0 | 0F2 0B1 0F3 0B2 | 0F4 0B3 0F5 0B4 | ...
    drained after the second call                                      0B3

So a step needs only its own rows, its losses are known when its call ends, and its remaining backwards run in the
next call. Calls are numbered from the last drain.

With two buffers the weights of an update are first read in the step after next. So stage s updates s backwards later
than possible: by then the first stage has run its backward too, and the global gradient norm is known without a wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from weft.schedule.actions import Action, Kind
from weft.schedule.registry import generate
from weft.schedule.schedule import Schedule, WeightRule

Actions = tuple[tuple[Action, ...], ...]  # by rank


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The calls of the schedule `name`, which has no flush. `vertical_sync`: as `WeightRule.VERTICAL_SYNC`."""

    name: str
    num_ranks: int
    num_microbatches: int
    vertical_sync: bool = False

    @property
    def delay(self) -> int:
        """Calls after its own until every stage has made a step's last update."""
        return -(-(self.num_ranks - 1) // self.num_microbatches)

    @cached_property
    def schedule(self) -> Schedule:
        """The shortest window that fills, runs full for a step and drains."""
        return self._window(self.delay + 2)

    def actions(self, call: int) -> Actions:
        """The actions of every rank in this call."""
        full = min(call, self.delay)  # later calls repeat this one
        return self._later(self._alike[full], call - full)

    def drain(self, call: int) -> Actions:
        """The remaining actions where `call` was the last."""
        full = min(call, self.delay)
        drained, endless = self._window(full + 1).ranks, self._endless(full + 1)
        found = tuple(own[self._begin(other, full + 1) :] for own, other in zip(drained, endless, strict=True))
        return self._later(found, call - full)

    def first(self, num_calls: int) -> Schedule:
        """The first calls as one schedule that does not drain."""
        ranks = tuple(own[: self._begin(own, num_calls)] for own in self._endless(num_calls))
        return replace(self._window(num_calls), ranks=ranks)

    @cached_property
    def _alike(self) -> list[Actions]:
        """The calls that fill the pipeline, and one with a full pipeline."""
        endless = self._endless(self.delay + 1)
        ends = [[self._begin(own, call) for own in endless] for call in range(self.delay + 2)]
        return [
            tuple(own[begin:end] for own, begin, end in zip(endless, ends[call], ends[call + 1], strict=True))
            for call in range(self.delay + 1)
        ]

    def _endless(self, num_calls: int) -> Actions:
        """A window so long that its first calls do not depend on its end."""
        return self._window(num_calls + self.delay + 1).ranks

    def _window(self, num_steps: int) -> Schedule:
        made = generate(
            self.name, num_ranks=self.num_ranks, num_microbatches=self.num_microbatches, num_steps=num_steps
        )
        if made.weight_rule is WeightRule.DOUBLE_BUFFER:
            return replace(made, ranks=tuple(map(_with_late_updates, made.ranks)))
        return replace(made, weight_rule=WeightRule.VERTICAL_SYNC) if self.vertical_sync else made

    def _begin(self, own: tuple[Action, ...], call: int) -> int:
        """The index of the call's first forward."""
        stage = own[0].stage
        return own.index(Action(Kind.F, stage, call * self.num_microbatches))

    def _later(self, actions: Actions, num_calls: int) -> Actions:
        shift = num_calls * self.num_microbatches
        return tuple(tuple(a._replace(microbatch=a.microbatch + shift) for a in own) for own in actions)


def _with_late_updates(own: tuple[Action, ...]) -> tuple[Action, ...]:
    found: list[Action] = []
    waiting: list[tuple[int, Action]] = []  # (backwards still to come, update)
    for action in own:
        if action.kind is Kind.U:
            waiting.append((action.stage, action))
        else:
            found.append(action)
            waiting = [(left - (action.kind is Kind.B), update) for left, update in waiting]
        found += [update for left, update in waiting if left == 0]
        waiting = [(left, update) for left, update in waiting if left > 0]
    return (*found, *(update for _, update in waiting))
