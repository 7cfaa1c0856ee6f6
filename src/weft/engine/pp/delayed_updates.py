"""Updates in a pipeline that does not drain: made on the way, when each stage has its gradients.

    two buffers (2BW)   one update a step; norm and clip over the whole model, as everywhere. The norm travels while the
                        pipeline goes on, since nobody reads the update before the step after next
    stashed (PipeDream) one update a micro-batch, of which the next forward may read: no stage can wait for another's
                        norm, so each clips by its own

A step's record tells the norm of the updates that are complete by then, those of `delay` steps before it, and 0 before
there is one; where a step has several, the root of their mean square.
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
class Sealed:
    """The gradients of one update, complete, and the sums over other stages that are under way."""

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
        self.sealed: list[Sealed] = []  # not yet applied
        self._squares: dict[int, list[Tensor]] = {}  # by step: those of its updates
        self._known: dict[int, Tensor] = {}  # by step: the whole of it, from an earlier process or before a restart

    def parts_of(self, batch: Batch, microbatches: Sequence[Batch]) -> Sequence[Batch]:
        return [batch] if self.is_global else microbatches

    def begin_step(self) -> StepUpdates:
        return StepUpdates(self, step=self.engine.steps_done, rates=current_rates(self.engine.optimizer))

    def finish_step(self) -> tuple[Tensor, bool]:
        return torch.zeros(()), False  # updates were made between other actions

    def held_tensors(self) -> Iterator[tuple[MemoryTerm, Sequence[Tensor]]]:
        sealed = [gradient for one in self.sealed for gradient in one.gradients if gradient is not None]
        yield MemoryTerm.GRADIENTS, [*sealed, *self.runner.versions.gradients]
        yield MemoryTerm.WEIGHT_VERSIONS, self.runner.versions.older

    def drain(self) -> None:
        self.runner.drain()

    def add(self, step: int, square: Tensor) -> None:
        self._squares.setdefault(step, []).append(square)

    def gather_values(
        self, loss_sum: Tensor, weight: Tensor, norm: Tensor, *, vote_stop: bool
    ) -> tuple[Tensor, dist.Work | None]:
        """As `Updates.gather_values`, not waited for: ranks are at different actions. The norm is squared."""
        engine, is_first = self.engine, dist.get_rank() == 0
        loss = loss_sum * engine.axes.owns_loss / torch.clamp(weight, min=1)
        square, vote = self._square_share(engine.steps_done - 1), torch.full_like(loss, float(vote_stop))
        values = torch.stack([value.double() for value in (loss, square, weight * is_first, vote)])
        return values, dist.all_reduce(values, async_op=True)

    def _square_share(self, step: int) -> Tensor:
        """What this rank adds to the mean square that the record of `step` tells; summed over all ranks."""
        told = step - self.runner.calls.delay
        nothing = torch.zeros((), device=self.engine.device)
        self._known = {known: value for known, value in self._known.items() if known >= told}
        if told in self._known:
            return nothing + self._known[told] * (dist.get_rank() == 0)
        squares = self._squares.pop(told, None)
        is_telling = dist.get_rank() == 0 if self.is_global else dist.get_rank() % self.engine.topology.stage_size == 0
        return torch.stack(squares).mean() if squares and is_telling else nothing

    def restart(self) -> None:
        """Everything drains, and norms that no record has told yet become known to every rank. Collective."""
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
    """Those of one step, which has learning rates of its own, one for each parameter group."""

    def __init__(self, owner: DelayedUpdates, *, step: int, rates: Sequence[float]) -> None:
        self._owner, self._step, self._rates = owner, step, rates

    @torch.no_grad()
    def seal(self, gradients: Sequence[Tensor | None]) -> Sealed:
        """Sums over the ranks of this stage; those over stages begin."""
        engine = self._owner.engine
        _put(engine, gradients)
        engine.strategy.reduce(engine.parameters)
        engine.is_updating = True
        for context in engine.axes:
            if not context.partitions_model:  # the stages' own sums begin below, and are waited for later
                context.sum_gradients(engine.trained)
        works = self._owner.shared.begin_sum(engine.trained)
        if self._owner.has_first:  # the copy that counts; all others have begun by now
            _wait(works)
        square = engine.gradient_norm(of_stage=True).square()
        if self._owner.is_global:
            works.append(dist.all_reduce(square, group=self._owner.runner.across, async_op=True))
        sealed = Sealed(gradients=[parameter.grad for parameter in engine.parameters], square=square, works=works)
        _put(engine, [None] * len(engine.parameters))
        engine.is_updating = False
        self._owner.sealed.append(sealed)
        return sealed

    @torch.no_grad()
    def apply(self, sealed: Sealed) -> None:
        owner, engine = self._owner, self._owner.engine
        _wait(sealed.works)
        owner.sealed.remove(sealed)
        engine.is_updating = True
        _put(engine, sealed.gradients)
        engine.show_gradients()
        if engine.clip_norm > 0:
            scale_gradients(engine.parameters, clip_factor(sealed.square.sqrt(), engine.clip_norm))
        with at_rate(engine.optimizer, self._rates):
            engine.optimizer.step()
        engine.look_at_dtypes()
        engine.strategy.after_update(engine.optimizer)
        engine.is_updating = False
        owner.add(self._step, sealed.square)


def _put(engine: Engine, gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(engine.parameters, gradients, strict=True):
        parameter.grad = gradient


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
