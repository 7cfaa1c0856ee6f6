"""What the engine sees of tensor parallelism, whichever way a model is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from weft.core.boxes import Part
from weft.engine.tp.grid import Grid
from weft.engine.tp.zones import Zones
from weft.models.tensor_layout import TensorLayout

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> summed loss


@dataclass(frozen=True, kw_only=True)
class TensorFace:
    """Parts of all parameters, how to take the loss of cut logits, and which rows of the batch this rank computes.

    `row_chunks` and `row_chunk`: the batch is dealt out over this many ranks of the axis (grids), and this rank's turn.
    `owns_loss`: of the ranks that compute the same loss, the one whose value counts.
    """

    grid: Grid
    parts: dict[str, Part]
    reasons: dict[str, str]  # why parameters stayed whole
    layout: TensorLayout | None = None  # what was cut, where what a step sends follows from it (one dimension)
    zones: Zones | None = None
    token_loss: TokenLoss | None = None  # None: logits are whole
    row_chunks: int = 1
    row_chunk: int = 0
    label_chunk: int = 0
    owns_loss: bool = True
    notes: tuple[str, ...] = field(default=())

    def rows_of(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's rows of a micro-batch that begins; labels may be those of other rows than the ids (the cube)."""
        if self.zones is not None:
            self.zones.end()  # a recomputing backward ends in the middle of a block
        if self.row_chunks == 1:
            return dict(batch)
        return {
            key: _chunk(value, self.row_chunks, self.label_chunk if key == "labels" else self.row_chunk)
            for key, value in batch.items()
        }


def _chunk(value: torch.Tensor, chunks: int, place: int) -> torch.Tensor:
    size = value.shape[0] // chunks
    return value[place * size : (place + 1) * size]
