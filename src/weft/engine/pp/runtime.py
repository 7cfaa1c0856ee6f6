"""What the engine sees of a pipeline, whether there is one or not: who computes what of a step, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from weft.core.terms import TimeTerm
from weft.engine.measure.timer import StepTimer
from weft.engine.objective import Batch
from weft.engine.pp.no_flush_runner import NoFlushRunner, Updates
from weft.engine.pp.schedule_runner import Forward, ScheduleRunner, Strategy
from weft.engine.pp.shared_weights import SharedWeights
from weft.engine.pp.stages import StageCall


@dataclass(frozen=True, kw_only=True)
class PipelineRuntime:
    """What the engine sees of a pipeline; `PipelineRuntime()` is a model that is not cut."""

    runner: ScheduleRunner | None = None
    shared: SharedWeights = field(default_factory=lambda: SharedWeights((), None))
    has_first: bool = True  # the first stage is here
    has_loss: bool = True  # the last one is

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Those of messages, and of weights that two stages share."""
        found = [self.runner.links.down, self.runner.links.up] if self.runner is not None else []
        found += [self.runner.across] if isinstance(self.runner, NoFlushRunner) else []
        return [*found, *([self.shared.group] if self.shared.group is not None else [])]

    @property
    def updates_per_step(self) -> int:
        if not isinstance(self.runner, NoFlushRunner):
            return 1
        return self.runner.calls.num_microbatches // self.runner.schedule.update_period

    def called(self, module: nn.Module, stage: int) -> Any:
        """The model as an objective is to see it."""
        if self.runner is None:
            return module
        return StageCall(module, self.runner.stages, stage)

    def train(
        self,
        forward: Forward,
        microbatches: Sequence[Batch],
        strategy: Strategy,
        timer: StepTimer,
        updates: Updates | None = None,
    ) -> None:
        """Gradients of every micro-batch; `forward(stage, index)` gives the loss of one, or what a stage sends.

        `updates` makes those of a pipeline that does not drain."""
        if self.runner is not None:
            shapes = list(map(_shape_of, microbatches))
            if isinstance(self.runner, NoFlushRunner) and updates is not None:
                self.runner.train_on(forward, strategy, updates, shapes=shapes)
            else:
                self.runner.train(forward, strategy, shapes=shapes)
            timer.mark(TimeTerm.FORWARD_BACKWARD)
            return
        for index in range(len(microbatches)):
            with strategy.microbatch(is_last=index == len(microbatches) - 1):
                loss = forward(0, index)
                timer.mark(TimeTerm.FORWARD)
                loss.backward()  # type: ignore[no-untyped-call]
                timer.mark(TimeTerm.BACKWARD)

    def measure(self, forward: Forward, microbatches: Sequence[Batch], strategy: Strategy) -> None:
        """Forwards alone."""
        if self.runner is not None:
            self.runner.measure(forward, strategy, shapes=list(map(_shape_of, microbatches)))
            return
        for index in range(len(microbatches)):
            forward(0, index)


def _shape_of(batch: Batch) -> tuple[int, ...]:
    return tuple(next(iter(batch.values())).shape)
