"""DistributedDataParallel: every rank holds the whole model; gradients are all-reduced once a step, overlapped.

DDP averages over its ranks, the engine wants sums, so the loss is multiplied by their number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.engine.dp.strategy import Strategy


class Replicated(Strategy):
    """torch's DDP around the model."""

    def __init__(self, model: nn.Module, *, group: dist.ProcessGroup, find_unused_parameters: bool) -> None:
        super().__init__(
            DistributedDataParallel(
                model,
                process_group=group,
                **_without_buffer_traffic(),
                gradient_as_bucket_view=True,  # else every gradient exists twice
                find_unused_parameters=find_unused_parameters,
            )
        )
        self.module.reducer = _FixedBuckets(self.module.reducer)  # type: ignore[assignment]
        self.loss_factor = float(dist.get_world_size(group))

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        module = self.module
        if is_last or not isinstance(module, DistributedDataParallel):
            yield
        else:
            with module.no_sync():
                yield


class _FixedBuckets:
    """DDP's reducer, which keeps the buckets it began with.

    DDP sorts its buckets anew after the first step. A ring adds an element's parts in an order that follows from its
    place in the bucket, so with three ranks or more a resumed run, whose first step has the old buckets again, would
    not have the bits of the uninterrupted one. `_rebuild_buckets` has no public switch;
    tests/multiproc/engine/test_resume_bits.py fails when it moves.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _without_buffer_traffic() -> dict[str, Any]:
    """Buffers are computed alike on every rank; sending them each step is waste. torch 2.13 renamed the switch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
