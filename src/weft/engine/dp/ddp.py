"""DistributedDataParallel: every rank holds the whole model; gradients are all-reduced once a step, overlapped.

DDP averages over its ranks, the engine wants sums: a communication hook sums. (Multiplying the loss by the number of
ranks instead makes float16 gradients overflow at other steps than on one device.)
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.engine.dp.strategy import Strategy


class Replicated(Strategy):
    """torch's DDP around the model."""

    def __init__(self, model: nn.Module, *, group: dist.ProcessGroup, find_unused_parameters: bool) -> None:
        module = DistributedDataParallel(
            model,
            process_group=group,
            **_without_buffer_traffic(),
            gradient_as_bucket_view=True,  # else every gradient exists twice
            find_unused_parameters=find_unused_parameters,
        )
        module.register_comm_hook(group, _sum_over_ranks)  # before the reducer is wrapped: the hook wants torch's own
        module.reducer = _FixedBuckets(module.reducer)  # type: ignore[assignment]
        super().__init__(module)

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        module = self.module
        if is_last or not isinstance(module, DistributedDataParallel):
            yield
        else:
            with module.no_sync():
                yield


def _sum_over_ranks(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    if work is None:
        raise RuntimeError("an asynchronous all-reduce gave no handle")
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


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
