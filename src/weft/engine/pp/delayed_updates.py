"""Updates in a pipeline that never flushes: made between other actions, when each stage has its gradients.

    two buffers (2BW)   one update per step; norm and clip over the full model, as in other layouts. The norm is reduced
                        while the pipeline runs on: the first forward to read the update is in the step after next
    stashed (PipeDream) one update per micro-batch, which the next forward may read: no stage can wait for the norm of
                        another, so each clips by its own

A step's record has the norm of the updates complete by then, those of `delay` steps before it, and 0 before there is
one; if a step has several, the root of their mean square.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.groups import sum_over
from weft.core.terms import MemoryTerm
from weft.engine.objective import Batch
from weft.engine.optim.clip import clip_factor, scale_gradients
from weft.engine.optim.group_rates import at_rate, current_rates
from weft.engine.pp.no_flush_runner import NoFlushRunner
from weft.engine.pp.shared_weights import SharedWeights
from weft.engine.updates import Updates
from weft.schedule import WeightRule

if TYPE_CHECKING:
    from weft.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingUpdate:
    """The complete gradients of one update, and the sums over stages in flight."""

    gradients: list[Tensor | None]
    square: Tensor
    works: list[dist.Work]


class DelayedUpdates(Updates):
    """The updates of an engine whose pipeline never flushes."""

    is_delayed = True

    def __init__(self, engine: Engine, runner: NoFlushRunner, shared: SharedWeights, *, has_first: bool) -> None:
        super().__init__(engine)
        self.runner, self.shared, self.has_first = runner, shared, has_first
        self.is_global = runner.schedule.weight_rule is WeightRule.DOUBLE_BUFFER
        self.pending: list[PendingUpdate] = []  # not yet applied
        self._squares: dict[int, list[Tensor]] = {}  # by step: those of its updates
        self._known: dict[int, Tensor] = {}  # by step: the complete value, from a checkpoint or before a restart

    def batches_by_update(self, batch: Batch, microbatches: Sequence[Batch]) -> Sequence[Batch]:
        return [batch] if self.is_global else microbatches

    def begin_step(self) -> StepUpdates:
        return StepUpdates(self, step=self.engine.steps_done, rates=current_rates(self.engine.optimizer))

    def finish_step(self) -> tuple[Tensor, bool]:
        return torch.zeros(()), False  # updates were made between other actions

    def held_tensors(self) -> Iterator[tuple[MemoryTerm, Sequence[Tensor]]]:
        pending = [gradient for one in self.pending for gradient in one.gradients if gradient is not None]
        yield MemoryTerm.GRADIENTS, [*pending, *self.runner.versions.gradients]
        yield MemoryTerm.WEIGHT_VERSIONS, self.runner.versions.older

    def drain(self) -> None:
        self.runner.drain()

    def add(self, step: int, square: Tensor) -> None:
        self._squares.setdefault(step, []).append(square)

    def gather_values(
        self, loss_sum: Tensor, weight: Tensor, norm: Tensor, *, vote_stop: bool
    ) -> tuple[Tensor, dist.Work | None]:
        """As `Updates.gather_values`, without waiting: ranks are at different actions. The norm is squared."""
        engine, is_first = self.engine, dist.get_rank() == 0
        loss = loss_sum * engine.axes.owns_loss / torch.clamp(weight, min=1)
        square, vote = self._square_term(engine.steps_done - 1), torch.full_like(loss, float(vote_stop))
        values = torch.stack([value.double() for value in (loss, square, weight * is_first, vote)])
        return values, dist.all_reduce(values, async_op=True)

    def _square_term(self, step: int) -> Tensor:
        """This rank's summand of the mean square in the record of `step`; summed over all ranks."""
        recorded = step - self.runner.calls.delay
        zero = torch.zeros((), device=self.engine.device)
        self._known = {known: value for known, value in self._known.items() if known >= recorded}
        if recorded in self._known:
            return zero + self._known[recorded] * (dist.get_rank() == 0)
        squares = self._squares.pop(recorded, None)
        owns_norm = dist.get_rank() == 0 if self.is_global else dist.get_rank() % self.engine.topology.stage_size == 0
        return torch.stack(squares).mean() if squares and owns_norm else zero

    def restart(self) -> None:
        """Drain, and sum norms that no record has yet, so that every rank knows them. Collective."""
        self.runner.restart()
        for step in sorted(self._squares):
            square = torch.stack(self._squares[step]).mean()
            if not self.is_global:
                sum_over(square, self.runner.across)
            self._known[step] = square
        self._squares.clear()

    def scalars(self) -> dict[str, float]:
        return {str(step): float(value) for step, value in self._known.items()}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self._squares.clear()
        device = self.engine.device
        self._known = {int(step): torch.tensor(float(value), device=device) for step, value in scalars.items()}


class StepUpdates:
    """The updates of one step, with the step's learning rates, one per parameter group."""

    def __init__(self, owner: DelayedUpdates, *, step: int, rates: Sequence[float]) -> None:
        self._owner, self._step, self._rates = owner, step, rates

    @torch.no_grad()
    def prepare(self, gradients: Sequence[Tensor | None]) -> PendingUpdate:
        """Sum over the ranks of this stage; begin the sums over stages."""
        engine = self._owner.engine
        _put(engine, gradients)
        engine.strategy.reduce(engine.parameters)
        engine.is_updating = True
        for context in engine.axes:
            if not context.partitions_model:  # the sums over stages begin below, and `apply` waits for them
                context.sum_gradients(engine.trained)
        works = self._owner.shared.begin_sum(engine.trained)
        if self._owner.has_first:  # the copy that the norm counts; the other rank has begun by now
            _wait(works)
        square = engine.gradient_norm(of_stage=True).square()
        if self._owner.is_global:
            works.append(dist.all_reduce(square, group=self._owner.runner.across, async_op=True))
        pending = PendingUpdate(
            gradients=[parameter.grad for parameter in engine.parameters], square=square, works=works
        )
        _put(engine, [None] * len(engine.parameters))
        engine.is_updating = False
        self._owner.pending.append(pending)
        return pending

    @torch.no_grad()
    def apply(self, pending: PendingUpdate) -> None:
        owner, engine = self._owner, self._owner.engine
        _wait(pending.works)
        owner.pending.remove(pending)
        engine.is_updating = True
        _put(engine, pending.gradients)
        engine.show_gradients()
        if engine.clip_norm > 0:
            scale_gradients(engine.parameters, clip_factor(pending.square.sqrt(), engine.clip_norm))
        with at_rate(engine.optimizer, self._rates):
            engine.optimizer.step()
        engine.look_at_dtypes()
        engine.strategy.after_update(engine.optimizer)
        engine.is_updating = False
        owner.add(self._step, pending.square)


def _put(engine: Engine, gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(engine.parameters, gradients, strict=True):
        parameter.grad = gradient


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
