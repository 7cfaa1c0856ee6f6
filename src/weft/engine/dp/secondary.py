"""The secondary shard of ZeRO-3 (hpZ of ZeRO++): a unit's backward gathers its weights inside a group of neighbours.

    forward    all-gather over all shards; each of N neighbours keeps 1/N of what arrived, in the dtype it arrived in
    backward   all-gather of these parts over the N neighbours: the same bits as in the forward; the parts are freed

Not `fully_shard(..., reshard_after_forward=N)`: there torch creates process groups for every unit (Gloo: threads and
sockets, NCCL: buffers), and gathers no weight that is sharded along an inner dimension. Here all units share one group,
through the public hook for all-gathers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.observer import wire_format
from weft.engine.dp.coded import CodedAllGather, UnitBuffers

# torch 2.13 renames it and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SecondaryAllGather(UnitBuffers):
    """The all-gathers of one unit. The first one keeps a part, the next one takes it."""

    def __init__(self, neighbours: dist.ProcessGroup, *, coded: CodedAllGather | None = None) -> None:
        """`coded`: the all-gather over all shards, where weights travel as codes. Neighbours send what was decoded:
        another rounding would give the backward other weights than the forward."""
        self._neighbours, self._coded = neighbours, coded
        self.kept: Tensor | None = None

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if self.kept is not None:
            with self._unnamed():
                _all_gather(output_tensor, self.kept, group=self._neighbours)
            self.kept = None
            return
        if self._coded is not None:
            self._coded(output_tensor, input_tensor, group)
        else:
            _all_gather(output_tensor, input_tensor, group=group)
        self.kept = output_tensor.view(self._neighbours.size(), -1)[self._neighbours.rank()].clone()

    def _unnamed(self) -> AbstractContextManager[None]:
        """Decoded weights are in the compute dtype: not the format in which weights leave their owner."""
        return wire_format("secondary", "weights") if self._coded is not None else nullcontext()
