"""Exchanges small JSON values between the ranks of a Gloo group. Not for tensors of the model.

JSON is sent in byte tensors, since `all_gather_object` unpickles the bytes that a peer sends.
Without a group (one process) every call returns at once.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """The ranks that save and load together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.group is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([text.numel()]), group=self.group)
        widest = max(int(size) for size in sizes)
        rows = [torch.zeros(widest, dtype=torch.uint8) for _ in sizes]
        padded = torch.zeros(widest, dtype=torch.uint8)
        padded[: text.numel()] = text
        dist.all_gather(rows, padded, group=self.group)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def from_rank_zero(self, value: Any) -> Any:
        """Rank 0's value, on every rank; other ranks' values are ignored."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def any_of_each(self, flags: list[bool]) -> list[bool]:
        """Per position, whether any rank has true. All ranks pass lists of the same length."""
        if self.group is None:
            return flags
        merged = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in merged.tolist()]
