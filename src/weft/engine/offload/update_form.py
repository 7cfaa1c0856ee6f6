"""`UpdateForm`: where and when offloaded states are updated, the host memory of it, and the object that does it.

place    device | host
when     after the gradients of a step, or beside the next step (delayed.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from weft.core import offload_sizes
from weft.engine.offload.chunk_kernel import ChunkKernel
from weft.engine.offload.chunks import StateBank, StateChunk
from weft.engine.offload.copy_streams import NoStreams
from weft.engine.offload.delayed import DelayedOnDevice, DelayedOnHost, IntoGradients, pending_bytes, weight_bytes
from weft.engine.offload.slab import HostSlab
from weft.engine.offload.state_store import HostStore
from weft.engine.offload.updates import DeviceUpdate, HostUpdate, staging_bytes

Update = DeviceUpdate | HostUpdate | DelayedOnHost
Late = DelayedOnDevice | DelayedOnHost


@dataclass(frozen=True, kw_only=True)
class UpdateForm:
    """See the module. `buckets`: memory of gradients that the next step writes to."""

    place: Literal["device", "host"]
    is_delayed: bool = False
    buckets: Callable[[], Sequence[torch.Tensor]] = list

    def kernel_of(self, optimizer: Optimizer) -> ChunkKernel:
        return IntoGradients(optimizer) if self.is_delayed and self.place == "device" else ChunkKernel(optimizer)

    def slot_bytes(self, chunks: Sequence[StateChunk], *, has_masters: bool) -> int:
        """Host memory of a chunk's weights and gradients on their way."""
        if self.place == "device":
            return 0
        if self.is_delayed:
            return max(map(weight_bytes, chunks), default=0)
        return max((staging_bytes(chunk, has_masters=has_masters) for chunk in chunks), default=0)

    def pending_bytes(self, banks: Sequence[StateBank]) -> int:
        """Host memory of the gradients of a delayed update."""
        return pending_bytes(banks) if self.is_delayed and self.place == "host" else 0

    def build(
        self,
        kernel: ChunkKernel,
        streams: NoStreams,
        *,
        store: HostStore,
        slab: HostSlab,
        banks: Sequence[StateBank],
        chunks: Sequence[StateChunk],
        slot_bytes: int,
        device: torch.device,
    ) -> tuple[Update, Late | None]:
        """The update of a step, and what delays it; takes the host memory that it needs from `slab`."""
        num_slots = offload_sizes.SLOTS
        if self.place == "device":
            update = DeviceUpdate(
                kernel, streams, store=store, chunks=chunks, device=device, num_slots=num_slots,
                keeps_slots=self.is_delayed,
            )  # fmt: skip
            if not isinstance(kernel, IntoGradients):
                return update, None
            return update, DelayedOnDevice(update, kernel, chunks=chunks, device=device, buckets=self.buckets)
        staging = [slab.take(slot_bytes, torch.uint8) for _ in range(num_slots)]
        if not self.is_delayed:
            return HostUpdate(kernel, streams, store=store, staging=staging, device=device), None
        late = DelayedOnHost(
            kernel, streams, chunks=chunks, staging=staging, device=device,
            pending={id(bank): slab.take(bank.num_elements, bank.dtype) for bank in banks},
            factor=slab.take(1, torch.float32)[0],
        )  # fmt: skip
        return late, late
