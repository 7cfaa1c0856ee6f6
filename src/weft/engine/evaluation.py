"""Evaluation: the same objective and division as training, without gradients, buffers synchronised afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.comm.groups import sum_over
from weft.engine.batch.rows import to_device
from weft.engine.objective import Batch, figures_of

if TYPE_CHECKING:
    from weft.engine.engine import Engine


@torch.no_grad()
def sum_losses(engine: Engine, batches: Batch | Sequence[Batch]) -> torch.Tensor:
    """The sum of token losses and the number of tokens, over all ranks. Collective."""
    totals = torch.zeros(2, device=engine.device, dtype=torch.float64)
    engine.model.eval()
    try:
        for batch in [batches] if isinstance(batches, Mapping) else batches:
            on_device = to_device(batch, engine.device)
            totals[1] += engine.objective.weight(on_device).to(engine.device) * engine.axes.owns_weight
            totals[0] += _measured(engine, engine.split(on_device)) * engine.axes.owns_loss
    finally:
        engine.model.train()
        figures_of(engine.objective).clear()
        engine.strategy.after_evaluation()
    engine.buffer_sync.synchronise()  # a module may count evaluations too
    return sum_over(totals, None)


def _measured(engine: Engine, microbatches: Sequence[Batch]) -> torch.Tensor:
    """The summed loss of all micro-batches; zero on ranks without the last stage."""
    total = torch.zeros((), device=engine.device, dtype=torch.float64)

    def forward(stage: int, index: int) -> torch.Tensor:
        loss_sum = engine.loss_sum(microbatches[index], stage=stage)
        total.add_(loss_sum)
        return loss_sum

    engine.runner.measure(forward, microbatches, engine.strategy)
    return total
