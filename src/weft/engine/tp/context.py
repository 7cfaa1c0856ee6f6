"""What the engine sees of tensor parallelism, whichever way a model is divided; `TPContext()` is one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from weft.core.errors import TensorParallelError
from weft.core.plan import TensorParallel
from weft.core.shards import LocalShard
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.chunked_loss import HeadShard
from weft.engine.tp.gradients import sum_partial_gradients
from weft.engine.tp.grid import Grid
from weft.models.layout import ModelLayout
from weft.models.tp.layout import TensorLayout

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> summed loss


@dataclass(frozen=True, kw_only=True)
class TPContext:
    """Local shards of all parameters, the loss of sharded logits, and this rank's rows of the batch.

    `row_chunks` and `row_chunk`: the batch is dealt out over this many ranks of the axis (grids), and this rank's turn.
    `owns_loss`: of the ranks that compute the same loss, the one whose value counts.
    """

    grid: Grid | None = None  # None: one rank has all of the model
    shards: dict[str, LocalShard] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # why parameters stayed whole
    layout: TensorLayout | None = None  # what was cut, where what a step sends follows from it (one dimension)
    zones: ActivationLayout | None = None
    token_loss: TokenLoss | None = None  # None: logits are whole
    head: HeadShard | None = None  # this rank's, for a loss that is fused with it (one dimension); None: it is whole
    row_chunks: int = 1
    row_chunk: int = 0
    label_chunk: int = 0
    owns_loss: bool = True

    @property
    def owns_weight(self) -> bool:
        """Of the ranks that are given the same rows, the one whose count of them counts."""
        return self.grid is None or self.grid.rank == 0

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return list(self.grid.groups.values()) if self.grid is not None else []

    def of_stages(self, layout: ModelLayout) -> TPContext:
        """What was cut of the parameters that are here, in a pipeline, by their names here."""
        here = {layout.copies.get(name, name): name for name in layout.unit_of}
        shards = {here[name]: shard for name, shard in self.shards.items() if name in here}
        own = self.layout.within({*layout.unit_of, *layout.ties}) if self.layout else None
        return replace(self, shards=shards, layout=own)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Those of which ranks have only shares."""
        if self.grid is not None:
            sum_partial_gradients(parameters, self.shards, self.grid)

    @contextmanager
    def explained(self, model: nn.Module, policy: TensorParallel) -> Iterator[None]:
        """A model whose own code does not take slices fails over a shape: said in one sentence, with what to change."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            if self.grid is None or isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            is_stream = policy.mode == "1d" and policy.sequence_parallel
            name, degree = type(model).__name__, self.grid.degree
            raise TensorParallelError(
                f"{name} does not compute on slices of {degree} tensor-parallel ranks: {lines[0]}",
                hint=f"{'set tensor_parallel.sequence_parallel = false, or' if is_stream else 'use'} mesh.tp = 1",
            ) from error

    def rows_of(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """This rank's rows of a micro-batch that begins; labels may be those of other rows than the ids (the cube)."""
        if self.zones is not None:
            self.zones.end()  # a recomputing backward ends in the middle of a block
        if self.row_chunks == 1:
            return batch
        return {
            key: _chunk(value, self.row_chunks, self.label_chunk if key == "labels" else self.row_chunk)
            for key, value in batch.items()
        }


def _chunk(value: torch.Tensor, chunks: int, place: int) -> torch.Tensor:
    size = value.shape[0] // chunks
    return value[place * size : (place + 1) * size]
