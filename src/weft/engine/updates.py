"""Optimizer updates of a step. `Updates` makes one, after the last backward; PipeDream makes its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.comm.groups import sum_over
from weft.core.terms import MemoryTerm
from weft.engine.objective import Batch, figures_of
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.optim.clip import clip_factor, scale_gradients
from weft.engine.precision import read_is_finite

if TYPE_CHECKING:
    from weft.engine.engine import Engine


class Updates:
    """One update per step: sum partial gradients, norm, clip, optimizer."""

    is_delayed = False  # whether micro-batches and updates of a step may be in calls of later steps

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def batches_by_update(self, batch: Batch, microbatches: Sequence[Batch]) -> Sequence[Batch]:
        """Batches whose losses are divided together: one per update."""
        return [batch]

    def begin_step(self) -> Any:
        """The updates of the step that begins, for a runner that makes them."""
        return None

    def finish_step(self) -> tuple[torch.Tensor, bool]:
        """The norm before clipping, and whether an overflow or a bad step skipped the update."""
        engine = self.engine
        engine.is_updating = True
        engine.axes.sum_gradients(engine.trained)
        engine.show_gradients()
        norm, skipped = self._update()
        engine.look_at_dtypes()
        engine.strategy.after_update(engine.optimizer)
        engine.is_updating = False
        return norm, skipped

    def gather_values(
        self, loss_sum: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, *, vote_stop: bool
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """Loss, norm, weight and votes to stop, over all ranks; the work is None if they are complete."""
        vote = torch.full_like(loss_sum, float(vote_stop))
        summed = sum_over(torch.stack([loss_sum * self.engine.axes.owns_loss, vote]), None)
        # float64: a float32 counts tokens exactly only up to 16.7 million
        values = (summed[0] / divisor(weight), norm, weight, summed[1])
        return torch.stack([value.double() for value in values]), None

    def add_figures(self, values: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
        """`values` with the sums of the objective's figures over all ranks, and their names."""
        engine = self.engine
        figures = figures_of(engine.objective)
        if self.is_delayed or not figures.names:
            return values, ()
        sums = sum_over(figures.take(engine.device) * engine.axes.owns_loss, None)
        return torch.cat([values, sums]), figures.names

    def drain(self) -> None:
        """Finish the micro-batches in flight. Collective."""

    def restart(self) -> None:
        """Drain, and begin again from the newest weights, delayed updates of offloaded states included; the host may
        read all states. Collective."""
        if self.engine.offload is not None:
            self.engine.offload.wait()

    def close(self) -> None:
        """Drain; a delayed update of offloaded states, which `drain` leaves in flight, lands; files are closed.
        Collective."""
        self.drain()
        if self.engine.offload is not None:
            self.engine.offload.close()

    def scalars(self) -> dict[str, float]:
        return {}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """`scalars` of a checkpoint."""

    def held_tensors(self) -> Iterator[tuple[MemoryTerm, Sequence[torch.Tensor]]]:
        """Tensors that updates hold between steps, by memory term."""
        if self.engine.offload is not None:
            gradients, buffers = self.engine.offload.delayed_tensors
            yield MemoryTerm.GRADIENTS, gradients
            yield MemoryTerm.COMM_BUFFERS, buffers

    def _update(self) -> tuple[torch.Tensor, bool]:
        engine = self.engine
        if engine.offload is not None:
            engine.offload.memory.begin_update()
        norm = engine.gradient_norm() / engine.loss_scale.value
        if engine.guard.refuses(norm):
            return norm, True
        if engine.loss_scale.enabled:
            is_finite = read_is_finite(norm)
            scale = engine.loss_scale.value
            engine.loss_scale.update(is_finite=is_finite)
            if not is_finite:
                return norm, True
            scale_gradients(engine.parameters, torch.full_like(norm, 1.0 / scale))
        if engine.clip_norm > 0:
            factor = clip_factor(norm, engine.clip_norm)
            if isinstance(engine.optimizer, AdamWLow):
                engine.optimizer.gradient_factor = factor  # its kernel multiplies as it reads: no separate pass
            else:
                scale_gradients(engine.parameters, factor)
        (engine.offload or engine.optimizer).step()
        return norm, False


def divisor(weight: torch.Tensor) -> torch.Tensor:
    """A global batch of zero weight (all padding) has zero loss and gradients, not 0/0."""
    return torch.where(weight > 0, weight, torch.ones_like(weight))
