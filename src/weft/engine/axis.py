"""The contract of a mesh axis inside the engine: the members that generic code reads after a plan was applied.

| question | answer of an axis |
| --- | --- |
| placement of each parameter | `shards`, and `replicated_reasons` for parameters that could be sharded and are not |
| rows of the batch | `row_chunks`, `row_chunk`, `rows_of`; `slices_of`: what a rank has of their activations |
| loss and token count | `owns_loss`, `owns_weight`: of ranks with the same value, the one that counts |
| gradients | `sum_gradients`, in the order of `Axes`, after the last backward and before the norm |
| process groups | `groups`; `activation_groups` for those that carry activations |
| different parameters per rank | `partitions_model`: norms and counts are summed over the axis |

The defaults replicate. Norm, clip, values, checkpoints, coverage and traffic follow; `Engine` names no axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.core.shards import LocalShard
from weft.engine.activations.slices import Slices, nested
from weft.engine.objective import Batch, ShardedLoss

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.microbatches import MicrobatchRunner
    from weft.engine.updates import Updates

T = TypeVar("T")
Parameters = Mapping[str, nn.Parameter]
Masters = Mapping[nn.Parameter, torch.Tensor]


class AxisContext:
    """One axis of an applied plan, on one rank. Axes override what differs from replication."""

    axis: str  # a name of `core.axes`
    partitions_model: bool = False
    shards: Mapping[str, LocalShard] = MappingProxyType({})  # by name, of parameters that this axis knows
    replicated_reasons: Mapping[str, str] = MappingProxyType({})
    row_chunks: int = 1  # the rows of a micro-batch are divided over this many ranks of the axis
    row_chunk: int = 0
    owns_loss: bool = True
    token_loss: ShardedLoss | None = None  # the loss of logits that the axis shards
    activation_layout: Slices | None = None  # where activations are sharded, whatever the rows; None: never

    @classmethod
    def of(cls, engine: Engine) -> Self | None:
        """The context of this class in `engine`; None without such an axis."""
        return next((context for context in engine.axes if isinstance(context, cls)), None)

    @property
    def owns_weight(self) -> bool:
        return True

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return ()

    @property
    def activation_groups(self) -> Sequence[dist.ProcessGroup]:
        return ()

    def rows_of(self, batch: Batch) -> Batch:
        """This rank's rows of a micro-batch, whose forward begins."""
        return batch

    def slices_of(self, batch: Batch) -> Slices | None:
        """How activations of these rows are divided, for dropout; None: never."""
        return self.activation_layout

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the full vocabulary, minus infinity where a slice is padded."""
        return logits

    def sum_gradients(self, trained: Parameters) -> None:
        """Sum the gradients that ranks of the axis hold as partial sums."""

    def after_load(self, trained: Parameters, optimizer: Optimizer, masters: Masters) -> None:
        """Copy loaded values to parameters that a checkpoint does not hold, or to their masters."""

    def around_forward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around model code, before `rows_of`: state of a forward, errors that this axis causes as one sentence."""
        return nullcontext()

    def runner(self) -> MicrobatchRunner | None:
        """Runs the micro-batches of a step; None leaves that to other axes."""
        return None

    def updates(self, engine: Engine) -> Updates | None:
        """Makes the optimizer updates of a step; None leaves that to other axes."""
        return None


class Axes(tuple[AxisContext, ...]):
    """All axes of an engine, in the order of their gradient sums."""

    @property
    def shards(self) -> dict[str, LocalShard]:
        """Chunks of parameters, composed where two axes shard one; `fully_shard` may shard its rows again."""
        return {name: shard for context in self for name, shard in context.shards.items()}

    @property
    def replicated_reasons(self) -> dict[str, str]:
        return {name: reason for context in self for name, reason in context.replicated_reasons.items()}

    @property
    def partitioning(self) -> tuple[str, ...]:
        """Axes whose ranks hold different parameters."""
        return tuple(context.axis for context in self if context.partitions_model)

    @property
    def owns_loss(self) -> bool:
        return all(context.owns_loss for context in self)

    @property
    def owns_weight(self) -> bool:
        return all(context.owns_weight for context in self)

    @property
    def activation_groups(self) -> list[dist.ProcessGroup]:
        return [group for context in self for group in context.activation_groups]

    @property
    def group_axes(self) -> dict[str, str]:
        """Group name -> axis, for all groups that axes created."""
        return {str(group.group_name): context.axis for context in self for group in context.groups}

    @property
    def token_loss(self) -> ShardedLoss | None:
        return self._first(lambda context: context.token_loss)

    def slices_of(self, batch: Batch) -> Slices | None:
        return nested(context.slices_of(batch) for context in self)

    @property
    def row_chunks(self) -> int:
        return math.prod(context.row_chunks for context in self)

    @property
    def row_chunk(self) -> int:
        place = 0
        for context in self:
            place = place * context.row_chunks + context.row_chunk
        return place

    def rows_of(self, batch: Batch) -> Batch:
        for context in self:
            batch = context.rows_of(batch)
        return batch

    def sum_gradients(self, trained: Parameters) -> None:
        for context in self:
            context.sum_gradients(trained)

    def after_load(self, trained: Parameters, optimizer: Optimizer, masters: Masters) -> None:
        for context in self:
            context.after_load(trained, optimizer, masters)

    @contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self:
                stack.enter_context(context.around_forward(model))
            yield

    def runner(self) -> MicrobatchRunner | None:
        return self._first(lambda context: context.runner())

    def updates(self, engine: Engine) -> Updates | None:
        return self._first(lambda context: context.updates(engine))

    def _first(self, ask: Callable[[AxisContext], T | None]) -> T | None:
        return next((found for found in map(ask, self) if found is not None), None)
