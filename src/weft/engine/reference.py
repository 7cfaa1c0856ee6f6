"""Log-probabilities of rows by the weights that an engine has now, in the engine's own layout: those of a reference.

A forward without gradients and dropout, as an evaluation: the objective is replaced by one that keeps a number per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.comm.groups import sum_over
from weft.core.axes import PP
from weft.engine.objective import Batch
from weft.engine.preference import PairObjective

if TYPE_CHECKING:
    from weft.engine.engine import Engine


class _KeptRows:
    """Keeps the log-probabilities of all rows that it sees."""

    def __init__(self, objective: PairObjective) -> None:
        self._objective = objective
        self.rows: list[torch.Tensor] = []

    def weight(self, batch: Batch) -> torch.Tensor:
        return self._objective.weight(batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.rows.append(self._objective.log_probs(model, batch).detach())
        return self.rows[-1].sum()


def row_log_probs(engine: Engine, batch: Batch) -> torch.Tensor:
    """The summed log-probabilities of the labels of each of this rank's rows. Collective."""
    objective = engine.objective
    if not isinstance(objective, PairObjective):
        raise TypeError("the engine has no objective of pairs")
    kept = _KeptRows(objective)
    engine.objective = kept
    try:
        engine.evaluate_nowait(batch)
    finally:
        engine.objective = objective
    count = next(iter(batch.values())).shape[0]
    found = torch.cat(kept.rows) if kept.rows else torch.zeros(count, dtype=torch.float64, device=engine.device)
    is_piped = engine.plan.mesh.pp > 1  # the last stage alone has logits
    return sum_over(found, engine.topology.group(PP)) if is_piped else found
