"""Runs the actions of one pipeline rank in the schedule's order: forwards, backwards, weight gradients; times them.

    F   receive, forward, send                      B   receive, backward, send the input's gradient
    I   B without the weight gradients              W   the weight gradients, which are sent to no rank

A schedule is only an order: gradients are those of one process with every schedule. The saved activations of a
micro-batch are freed with its last action; on the last stage that is the loss and its graph, without logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from weft.engine.activations.split_backward import SplitBackward
from weft.engine.microbatches import Forward
from weft.engine.pp.action_times import ActionClock, ActionTimes
from weft.engine.pp.p2p import Message, P2PExchange, ShapeKey, ShapeRegistry, StageLinks
from weft.engine.pp.stages import StageDone, Stages
from weft.schedule import Action, Kind, Schedule


class StrategyHooks(Protocol):
    """The hooks of data parallelism (`engine/dp/strategy.py`): when to reduce gradients and free gathered weights."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]: ...

    def stage(self, blocks: Sequence[str], *, is_last: bool, is_very_last: bool) -> AbstractContextManager[None]: ...

    def backward_input(self) -> AbstractContextManager[None]: ...

    def backward_weight(self) -> None: ...

    def after_backwards(self) -> None: ...


class ScheduleRunner:
    """One rank of a pipeline."""

    def __init__(self, schedule: Schedule, stages: Stages, links: StageLinks, *, device: torch.device) -> None:
        self.schedule, self.stages, self.links = schedule, stages, links
        self.record = ActionTimes()  # of the last step
        self.watched: list[ActionTimes] = []
        self._clock: ActionClock | None = None
        self._num_to_watch = 0
        self._device = device
        self.known_shapes = ShapeRegistry()
        self.is_in_backward = False  # for measurements: part of a backward runs outside of autograd
        self._split = {action[1:] for action in schedule.ranks[links.place] if action.kind is Kind.I}
        self._last_backward = _last_backwards(schedule.ranks[links.place])

    def watch(self, num_steps: int, *, num_disturbed: int = 0) -> None:
        """Time every action of the next `num_steps` steps into `watched`. Call it between two steps.

        The first `num_disturbed` of them may be slower for other reasons."""
        self._clock, self._num_to_watch = ActionClock(self._device), num_steps
        self.watched = []

    @property
    def watched_schedule(self) -> Schedule:
        """The schedule of each of `watched`."""
        return self.schedule

    def weights(self, stage: int, index: int) -> AbstractContextManager[None]:
        """Around a forward or a backward: sets the weight version of this micro-batch."""
        return nullcontext()

    def train(self, forward: Forward, strategy: StrategyHooks, *, shapes: Sequence[ShapeKey]) -> None:
        """Accumulate the gradients of micro-batches of these shapes into the parameters of this rank's stages."""
        step = Step(self, forward, strategy)
        step.p2p.expect(self.schedule.ranks, dict(enumerate(shapes)))
        step.record.clock = self._clock if len(self.watched) < self._num_to_watch else None
        for index, action in enumerate(self.schedule.ranks[self.links.place]):
            step.do(action, is_last_backward=self._last_backward[action.stage] == index)
        step.p2p.finish()
        strategy.after_backwards()
        self.is_in_backward = False
        self.record = step.record
        self.watched += [step.record] if step.record.clock is not None else []

    def measure(self, forward: Forward, strategy: StrategyHooks, *, shapes: Sequence[ShapeKey]) -> None:
        """Run the forwards alone."""
        ranks = [
            [Action(Kind.F, stage, index) for index in range(len(shapes)) for stage in own]
            for own in self.schedule.rank_to_stages
        ]
        step = Step(self, forward, strategy)
        step.p2p.expect(ranks, dict(enumerate(shapes)))
        for action in ranks[self.links.place]:
            step.forward(action)
            step.saved.clear()
        step.p2p.finish()


class Step:
    """State of the actions in progress."""

    def __init__(self, runner: ScheduleRunner, forward: Forward, strategy: StrategyHooks) -> None:
        self.runner, self._forward, self._strategy = runner, forward, strategy
        self.p2p = P2PExchange(runner.links, runner.schedule.stage_to_rank, runner.known_shapes)
        self.saved: dict[tuple[int, int], tuple[Tensor | None, Tensor, SplitBackward | None]] = {}
        self.record = ActionTimes()
        self._in_flight: Counter[int] = Counter()
        self._ended = 0  # stages whose last backward has begun

    def go_on(self, forward: Forward) -> None:
        """Continue with another forward; micro-batches in flight stay."""
        self._forward = forward

    def do(self, action: Action, *, is_last_backward: bool) -> None:
        self.runner.is_in_backward = action.kind is not Kind.F
        if action.kind is Kind.F:
            self.forward(action)
        elif action.kind is Kind.W:
            self.weights(action, is_last=is_last_backward)
        else:
            self.backward(action, is_last=is_last_backward)

    def forward(self, action: Action) -> None:
        _, stage, index = action
        asked = self.record.now()
        stages = self.runner.stages
        received = self._receive(Message("forward", stage, index)) if stage > 0 else None
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        start = self.record.now()
        is_split = (stage, index) in self.runner._split and torch.is_grad_enabled()
        split_backward = SplitBackward() if is_split else None
        with self.runner.weights(stage, index), stages.forward_of(stage, received):
            try:
                with split_backward or nullcontext():
                    output = self._forward(stage, index)
            except StageDone as done:
                output = done.hidden
        self.record.note(action, asked, start)
        self.saved[stage, index] = (received, output, split_backward)
        self._in_flight[stage] += 1
        self.record.most_in_flight[stage] = max(self.record.most_in_flight.get(stage, 0), self._in_flight[stage])
        if stage < stages.last:
            self.runner.known_shapes.given[stage, self.p2p.shape_of(index)] = (tuple(output.shape), output.dtype)
            self.p2p.send(Message("forward", stage + 1, index), output.detach())

    def backward(self, action: Action, *, is_last: bool) -> None:
        kind, stage, index = action
        asked = self.record.now()
        received, output, split_backward = self.saved.pop((stage, index))
        gradient = self._receive(Message("backward", stage, index)) if stage < self.runner.stages.last else None
        start = self.record.now()
        is_half = kind is Kind.I
        strategy = self._strategy.backward_input() if is_half else self._strategy_of(stage, is_last=is_last)
        with self.runner.weights(stage, index), strategy:
            torch.autograd.backward(output, gradient)
        self.record.note(action, asked, start)
        if is_half:
            self.saved[stage, index] = (None, output.new_empty(0), split_backward)
        else:
            self._in_flight[stage] -= 1
        if received is not None:
            if received.grad is None:
                raise RuntimeError(f"the input of stage {stage} got no gradient")
            self.p2p.send(Message("backward", stage - 1, index), received.grad)

    def weights(self, action: Action, *, is_last: bool) -> None:
        _, stage, index = action
        _, _, split_backward = self.saved.pop((stage, index))
        start = self.record.now()
        if split_backward is None:
            raise RuntimeError(f"{action} has no saved weight gradients")
        with self._strategy.backward_input():
            split_backward.run()
            self._strategy.backward_weight()  # accumulates with the gradients of the input backward, in one dtype
        with self._strategy_of(stage, is_last=is_last):
            self._strategy.backward_weight()
        self._in_flight[stage] -= 1
        self.record.note(action, start, start)

    def _strategy_of(self, stage: int, *, is_last: bool) -> AbstractContextManager[None]:
        self._ended += is_last
        is_very_last = self._ended == len(self.runner.stages.own)
        return self._strategy.stage(self.runner.stages.split.stages[stage], is_last=is_last, is_very_last=is_very_last)

    def _receive(self, message: Message) -> Tensor:
        return self.p2p.receive(message, device=self.runner._device)


def _last_backwards(actions: Sequence[Action]) -> Mapping[int, int]:
    """Stage -> position of the action that completes its gradients."""
    return {action.stage: index for index, action in enumerate(actions) if action.kind in (Kind.B, Kind.W)}
