"""The tensor-parallel axis of one rank, in one dimension or on a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.core import axes
from weft.core.errors import TensorParallelError
from weft.core.shards import LocalShard
from weft.engine import collectives
from weft.engine.axis import AxisContext
from weft.engine.objective import Batch, ShardedLoss
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.chunked_loss import HeadShard
from weft.engine.tp.gradients import sum_partial_gradients
from weft.engine.tp.grid import Grid
from weft.models.layout import ModelLayout
from weft.models.tp.layout import TensorLayout


@dataclass(frozen=True, kw_only=True)
class TPContext(AxisContext):
    """Local shards of all parameters, the loss of sharded logits, and this rank's rows of the batch.

    `row_chunks` and `row_chunk`: the number of row chunks of the batch over the axis (grids), and this rank's chunk.
    `owns_loss`: of the ranks with the same loss, the one whose value counts.
    """

    axis = axes.TP

    grid: Grid
    shards: Mapping[str, LocalShard] = field()
    replicated_reasons: Mapping[str, str] = field()
    layout: TensorLayout | None = None  # of one dimension: the collectives of a step follow from it
    activation_layout: ActivationLayout = field()
    token_loss: ShardedLoss | None = None  # None: logits are replicated
    head: HeadShard | None = None  # of one dimension, for a loss fused with the head
    row_chunks: int = 1
    row_chunk: int = 0
    label_chunk: int = 0
    owns_loss: bool = True

    @property
    def owns_weight(self) -> bool:
        return self.grid.rank == 0

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return list(self.grid.groups.values())

    @property
    def activation_groups(self) -> Sequence[dist.ProcessGroup]:
        return self.groups

    def of_stages(self, layout: ModelLayout) -> TPContext:
        """Restrict the shards to the parameters of this rank's pipeline stages, by their names there."""
        here = {layout.copies.get(name, name): name for name in layout.unit_of}
        shards = {here[name]: shard for name, shard in self.shards.items() if name in here}
        own = self.layout.within({*layout.unit_of, *layout.ties}) if self.layout else None
        return replace(self, shards=shards, layout=own)

    def with_experts(self, shards: Mapping[str, LocalShard]) -> TPContext:
        """The shards of experts, which expert parallelism divides too."""
        return replace(self, shards={**self.shards, **shards})

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        if self.token_loss is None or self.head is None:
            return logits
        padded = F.pad(logits, (0, self.head.most_tokens - logits.shape[-1]), value=-torch.inf)
        return collectives.collect(padded, self.head.group, padded.ndim - 1)

    def sum_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        sum_partial_gradients(trained, self.shards, self.grid)

    @contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        """Model code that does not compute on shards fails with a shape error."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            is_stream = self.activation_layout.sequence_parallel
            name, degree = type(model).__name__, self.grid.degree
            raise TensorParallelError(
                f"{name} does not compute on shards of {degree} tensor-parallel ranks: {lines[0]}",
                hint=f"{'set tensor_parallel.sequence_parallel = false, or' if is_stream else 'use'} mesh.tp = 1",
            ) from error

    def rows_of(self, batch: Batch) -> Batch:
        """On a cube, labels may have other rows than the ids."""
        self.activation_layout.end()  # a recomputing backward ends in the middle of a block
        if self.row_chunks == 1:
            return batch
        return {
            key: _chunk(value, self.row_chunks, self.label_chunk if key == "labels" else self.row_chunk)
            for key, value in batch.items()
        }


def _chunk(value: torch.Tensor, chunks: int, place: int) -> torch.Tensor:
    size = value.shape[0] // chunks
    return value[place * size : (place + 1) * size]
