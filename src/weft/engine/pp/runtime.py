"""The pipeline axis of one rank: its schedule runner, weights that two stages share, ownership of loss and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.core import axes
from weft.core.terms import TimeTerm
from weft.engine.axis import AxisContext
from weft.engine.measure.timer import StepTimer
from weft.engine.microbatches import Forward, MicrobatchRunner
from weft.engine.objective import Batch
from weft.engine.pp.delayed_updates import DelayedUpdates
from weft.engine.pp.no_flush_runner import NoFlushRunner
from weft.engine.pp.schedule_runner import ScheduleRunner, StrategyHooks
from weft.engine.pp.shared_weights import SharedWeights
from weft.engine.pp.stages import StageCall

if TYPE_CHECKING:
    from weft.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class PipelineRuntime(AxisContext):
    """`has_first` and `has_loss`: whether the first and the last stage are on this rank."""

    axis = axes.PP
    partitions_model = True

    schedule_runner: ScheduleRunner
    shared: SharedWeights
    has_first: bool
    has_loss: bool

    @property
    def owns_weight(self) -> bool:
        return self.has_loss

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """The groups of P2P messages, and of weights that two stages share."""
        runner = self.schedule_runner
        found = [runner.links.down, runner.links.up]
        found += [runner.across] if isinstance(runner, NoFlushRunner) else []
        return [*found, *([self.shared.group] if self.shared.group is not None else [])]

    def sum_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        self.shared.sum_gradients(trained)

    def after_load(
        self,
        trained: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        masters: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        self.shared.broadcast(trained, optimizer, masters)

    def runner(self) -> MicrobatchRunner:
        return self

    def updates(self, engine: Engine) -> DelayedUpdates | None:
        runner = self.schedule_runner
        if not isinstance(runner, NoFlushRunner):
            return None
        return DelayedUpdates(engine, runner, self.shared, has_first=self.has_first)

    # --- as a runner of micro-batches ---------------------------------------------------------------------------

    @property
    def is_in_backward(self) -> bool:
        return self.schedule_runner.is_in_backward

    def callable_for(self, module: nn.Module, stage: int) -> Any:
        return StageCall(module, self.schedule_runner.stages, stage)

    def train(
        self, forward: Forward, microbatches: Sequence[Batch], strategy: StrategyHooks, timer: StepTimer, updates: Any
    ) -> None:
        runner, shapes = self.schedule_runner, list(map(_shape_of, microbatches))
        if isinstance(runner, NoFlushRunner):
            runner.train_on(forward, strategy, updates, shapes=shapes)
        else:
            runner.train(forward, strategy, shapes=shapes)
        timer.mark(TimeTerm.FORWARD_BACKWARD)

    def measure(self, forward: Forward, microbatches: Sequence[Batch], strategy: StrategyHooks) -> None:
        self.schedule_runner.measure(forward, strategy, shapes=list(map(_shape_of, microbatches)))


def _shape_of(batch: Batch) -> tuple[int, ...]:
    return tuple(next(iter(batch.values())).shape)
