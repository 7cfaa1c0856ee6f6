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
        self.loss_factor = float(dist.get_world_size(group))

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        module = self.module
        if is_last or not isinstance(module, DistributedDataParallel):
            yield
        else:
            with module.no_sync():
                yield


def _without_buffer_traffic() -> dict[str, Any]:
    """Buffers are computed alike on every rank; sending them each step is waste. torch 2.13 renamed the switch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
