"""Runs a schedule that never flushes (PipeDream, PipeDream-2BW): each stage makes its updates between other actions.

A call runs the forwards of one step and the backwards and updates in between; later calls, or `drain`, run the rest.
The number of a micro-batch alone decides its weight version, not time: draining in between costs a bubble and changes
no value. `restart` does: from there on everything reads the newest weights, as at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.microbatches import Forward
from weft.engine.pp.action_times import ActionTimes
from weft.engine.pp.p2p import ShapeKey, StageLinks
from weft.engine.pp.schedule_runner import ScheduleRunner, Step, StrategyHooks
from weft.engine.pp.stages import Stages
from weft.engine.pp.weight_stash import WeightStash
from weft.schedule import Action, Actions, Calls, Kind, Schedule, version_for


class StepUpdateHooks(Protocol):
    """Makes a step's updates: `prepare` after the last backward of one, `apply` in its place in the schedule."""

    def prepare(self, gradients: Sequence[Tensor | None]) -> Any: ...

    def apply(self, pending: Any) -> None: ...


class NoFlushRunner(ScheduleRunner):
    """One rank of a pipeline that holds one stage."""

    def __init__(
        self,
        calls: Calls,
        stages: Stages,
        links: StageLinks,
        versions: WeightStash,
        *,
        across: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(calls.schedule, stages, links, device=device)
        self.calls, self.versions = calls, versions
        self.across = across  # a separate group for sums over stages: ranks reach those at different actions
        (self.stage,) = stages.own
        self._step: Step | None = None
        self._updates: dict[int, StepUpdateHooks] = {}  # by step, until its last update is made
        self._pending: dict[int, Any] = {}  # by the update's last micro-batch
        self._num_steps = 0  # since the restart
        self._num_forwards = 0  # micro-batches, since then
        self._num_drained = 0  # of these, before the last drain
        self._window: list[ActionTimes] = []
        self._num_to_skip = 0

    @property
    def is_drained(self) -> bool:
        return self._num_drained == self._num_steps

    @property
    def watched_schedule(self) -> Schedule:
        return self.calls.first(max(1, len(self._window)))

    def watch(self, num_steps: int, *, num_disturbed: int = 0) -> None:
        """Watch one interval from an empty pipeline on; if it does not begin at once, the pipeline drains first."""
        super().watch(num_steps - num_disturbed)
        self._num_to_skip = num_disturbed
        self._window = []

    def weights(self, stage: int, index: int) -> AbstractContextManager[None]:
        # an evaluation reads the newest, which the model holds
        return self.versions.reading(self._version(index)) if torch.is_grad_enabled() else nullcontext()

    def train_on(
        self, forward: Forward, strategy: StrategyHooks, updates: StepUpdateHooks, *, shapes: Sequence[ShapeKey]
    ) -> None:
        """Run the forwards of one more step, and the actions in between."""
        is_watched = self._begin_watch()
        first = self._num_steps * self.calls.num_microbatches
        if self._step is None:
            self._step = Step(self, forward, strategy)
        self._step.go_on(lambda stage, index: forward(stage, index - first))
        self._updates[self._num_steps] = updates
        call = self._num_steps - self._num_drained
        self._num_steps += 1
        self._step.record = ActionTimes(clock=self._clock if is_watched else None)
        self._run_actions(self.calls.actions(call), {first + index: shape for index, shape in enumerate(shapes)})
        self.record = self._step.record
        if self._step.record.clock is not None:
            self._window.append(self._step.record)
            self.watched = [ActionTimes.joined(self._window)]

    @torch.enable_grad()  # an evaluation calls it under no_grad
    def drain(self) -> None:
        """Finish the micro-batches in flight. Collective."""
        if self._step is None or self.is_drained:
            return
        self._step.record = ActionTimes()
        last_call = self._num_steps - self._num_drained - 1
        self._run_actions(self.calls.drain(last_call), {})
        self._step.p2p.finish()
        self._num_drained = self._num_steps
        self._num_to_watch = min(self._num_to_watch, len(self._window) or self._num_to_watch)  # ends the interval

    def restart(self) -> None:
        """Drain, and free older weights: the next step begins with the newest. Collective."""
        self.drain()
        self.versions.restart()
        self._updates.clear()
        self._num_steps = self._num_drained = self._num_forwards = 0

    def _begin_watch(self) -> bool:
        """Whether the next call is watched."""
        is_due = self._clock is not None and self._num_to_skip == 0
        self._num_to_skip = max(0, self._num_to_skip - 1)
        if is_due and not self._window:
            self.drain()
        return is_due and len(self._window) < self._num_to_watch

    def _run_actions(self, actions: Actions, shapes: dict[int, ShapeKey]) -> None:
        step, shift = self._step, self._num_drained * self.calls.num_microbatches
        if step is None:
            raise RuntimeError("no micro-batch is in flight")
        actions = tuple(tuple(a._replace(microbatch=a.microbatch + shift) for a in own) for own in actions)
        step.p2p.expect(actions, shapes)
        for action in actions[self.links.place]:
            if action.kind is Kind.U:
                self._update(step, action)
                continue
            step.do(action, is_last_backward=False)
            self._num_forwards += action.kind is Kind.F
            if action.kind is Kind.B:
                step.p2p.forget(action.microbatch)
                self._prepare_update(action.microbatch)
        self.is_in_backward = False

    def _prepare_update(self, index: int) -> None:
        """After the last backward of an update, take its gradients."""
        if (index + 1) % self.schedule.update_period == 0:
            gradients = self.versions.take_gradients(self._version(index))
            self._pending[index] = self._updates[index // self.calls.num_microbatches].prepare(gradients)

    def _update(self, step: Step, action: Action) -> None:
        start = step.record.now()
        oldest = min((index for _, index in step.saved), default=self._num_forwards)
        lowest = self._version(oldest)
        number = action.microbatch // self.calls.num_microbatches
        self.is_in_backward = False
        with self.versions.updating(lowest=lowest):
            self._updates[number].apply(self._pending.pop(action.microbatch))
        if (action.microbatch + 1) % self.calls.num_microbatches == 0:
            del self._updates[number]
        step.record.note(action, start, start)

    def _version(self, index: int) -> int:
        return version_for(self.schedule, stage=self.stage, microbatch=index)
