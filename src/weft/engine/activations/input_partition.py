"""ZeRO-R: one share of a block's input per tensor-parallel rank, gathered by all of them in the backward."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from weft.engine import collectives


class InputPartition:
    """Shares of flat tensors that are equal on all ranks of a group; the last share is padded if they are uneven."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._degree, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def share_length(self, numel: int) -> int:
        return -(-numel // self._degree)

    def own_share(self, flat: Tensor) -> Tensor:
        """A copy: a view would keep the memory of all shares."""
        length = self.share_length(flat.numel())
        own = flat[self._rank * length : (self._rank + 1) * length]
        if own.numel() == length:
            return own.clone()
        padded = flat.new_zeros(length)
        padded[: own.numel()].copy_(own)
        return padded

    def gathered(self, own: Tensor, numel: int) -> Tensor:
        """Collective: ranks recompute their blocks in the same order."""
        return collectives.gathered(own, self._group, 0)[:numel]
