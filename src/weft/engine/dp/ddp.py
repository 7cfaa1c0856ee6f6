"""DistributedDataParallel: every rank holds the full model; gradients are all-reduced once per step, overlapped.

DDP averages over its ranks, the engine needs sums: a communication hook sums. (Multiplying the loss by the number of
ranks instead makes float16 gradients overflow at other steps than on one device.)
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from weft.comm.sums import GroupSum
from weft.core.errors import PlanError
from weft.engine.dp.coded import errors_of_buckets
from weft.engine.dp.gradient_leaves import GradientLeaves, has_wide_gradients
from weft.engine.dp.strategy import Strategy

FIRST_BUCKET_BYTES = 2**20  # torch's own size


class Replicated(Strategy):
    """torch's DDP around the model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        sums: GroupSum,
        find_unused_parameters: bool,
        bucket_bytes: int,
        feeds_back: bool = False,
    ) -> None:
        self._leaves = GradientLeaves(model) if has_wide_gradients(model) else None
        sizes: list[int] = []
        with _buckets_from_the_start(bucket_bytes, sizes):
            module = DistributedDataParallel(
                self._leaves or model,
                process_group=sums.group,
                init_sync=self._leaves is None,  # ranks have the same weights in any case
                **_without_buffer_traffic(),
                gradient_as_bucket_view=True,  # else every gradient exists twice
                find_unused_parameters=find_unused_parameters,
            )
        # before the reducer is wrapped: the hook needs torch's own
        self._buckets: dict[int, torch.Tensor] = {}
        module.register_comm_hook(_HookState(sums=sums, buckets=self._buckets), _sum_over_ranks)
        module.reducer = _FixedBuckets(module.reducer)  # type: ignore[assignment]
        super().__init__(module)
        if feeds_back:
            self.errors = errors_of_buckets(sums, sizes, device=next(model.parameters()).device)
        self._may_be_unused = find_unused_parameters
        self._must_all_be_used = not find_unused_parameters

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        module = self.module
        if is_last or not isinstance(module, DistributedDataParallel):
            yield
            if self._must_all_be_used:
                self._require_gradients()
            if self._leaves is not None:
                self._leaves.show_gradients()
        else:
            with module.no_sync():
                yield

    def _require_gradients(self) -> None:
        """Once, after the first backward: DDP does not reduce a bucket in which one gradient is missing."""
        trained = [(name, value) for name, value in self.module.named_parameters() if value.requires_grad]
        names = self._leaves.names if self._leaves else [name.removeprefix("module.") for name, _ in trained]
        unused = [name for name, (_, value) in zip(names, trained, strict=True) if value.grad is None]
        if unused:
            raise PlanError(
                f"{len(unused)} parameters get no gradient ({unused[0]} for one), and DDP waits for all of them",
                hint="set data_parallel.find_unused_parameters = true, or use data_parallel.zero = 1, 2 or 3",
            )
        self._must_all_be_used = False

    def clear_gradients(self, optimizer: Optimizer) -> None:
        """Gradients stay in their buckets: every micro-batch that does not reduce would allocate dropped ones anew,
        beside the buckets. With unused parameters, zero is not the same as None: the optimizer would update them."""
        optimizer.zero_grad(set_to_none=self._may_be_unused)
        if self._leaves is not None and self._may_be_unused:
            self._leaves.forget_gradients()

    def gradient_buckets(self) -> list[torch.Tensor]:
        """The reducer's buffers, known once the first step has reduced them."""
        return list(self._buckets.values())


@dataclass(frozen=True, kw_only=True)
class _HookState:
    """The state of DDP's communication hook: the sum, and a record of the buffers."""

    sums: GroupSum
    buckets: dict[int, torch.Tensor]


def _sum_over_ranks(
    state: _HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> torch.futures.Future[torch.Tensor]:
    buffer: torch.Tensor = bucket.buffer()
    state.buckets[bucket.index()] = buffer
    wide = buffer.float()  # the buffer itself, unless gradients have a lower precision than sums
    sizes = tuple(parameter.numel() for parameter in bucket.parameters())
    summed = state.sums.begin(wide, place=bucket.index(), sizes=sizes)
    if bucket.is_last():
        state.sums.finish()
    if wide is buffer:
        return summed
    return summed.then(lambda future: buffer.copy_(future.value()))


@contextmanager
def _buckets_from_the_start(bucket_bytes: int, sizes: list[int]) -> Iterator[None]:
    """Buckets in the order of gradients, the first one small, from the first step on. `sizes` gets their elements.

    DDP begins with one bucket for everything, which cannot be sent before the backward has ended, and splits it after
    the first step; `_FixedBuckets` has the reason why it must not. Private, since torch has no public way to set
    buckets; tests/multiproc/dryrun counts them, and fails when this moves.
    """
    compute = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def by_arrival(parameters: list[torch.Tensor], _limits: Any, is_sparse: list[bool]) -> Any:
        order = list(reversed(range(len(parameters))))
        arriving = [parameters[index] for index in order]
        sparse = [is_sparse[index] for index in order]
        indices, limits = compute(arriving, [min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes], sparse, order)
        sizes[:] = [sum(parameters[index].numel() for index in bucket) for bucket in indices]
        return list(reversed(indices)), list(reversed(limits))  # DDP reverses them again

    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", by_arrival):
        yield


class _FixedBuckets:
    """DDP's reducer with the buckets of its first step.

    DDP rebuilds its buckets after the first step. A ring sums an element over ranks in an order that follows from its
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
    """`engine/buffers/sync.py` keeps changing buffers equal, in every layout alike; sending constants is waste.
    torch 2.13 renamed the switch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
