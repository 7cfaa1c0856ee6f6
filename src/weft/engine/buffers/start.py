"""Buffers begin with equal values on all ranks, as after the construction of torch's DDP: those of the first rank.

A model whose code draws a buffer at random, or reads it from a rank's own file, has another value on every rank. Only
buffers that differ are sent: a checksum of each is compared first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode

from weft.comm.observer import buffer_collectives
from weft.engine.buffers.changes import Slot

_ABSENT = 2**62  # the checksum of a buffer that this rank's stages do not have


@torch.no_grad()
def equalise(slots: Sequence[Slot], *, device: torch.device, stage_group: dist.ProcessGroup | None) -> list[str]:
    """Send the buffers that differ, from the first rank; those that some stages lack within each stage. Collective.

    Returns the names of the buffers that this rank sent or received. Buffers of unequal shape are left alone."""
    if not slots or dist.get_world_size() == 1 or active_fake_mode() is not None:
        return []
    values = [slot.value for slot in slots]
    bits = _Compared([_ABSENT if value is None else _digest(_raw(value)) for value in values], device=device)
    shapes = _Compared([_ABSENT if value is None else _digest(_form(value)) for value in values], device=device)
    sent = []
    for place, value in enumerate(values):
        if not bits.differs(place) or shapes.differs(place):
            continue
        group = None if bits.is_everywhere(place) else stage_group
        if value is not None:
            wire = value.detach().to(device).reshape(-1).contiguous().view(torch.uint8)  # every backend sends bytes
            with buffer_collectives():
                dist.broadcast(wire, group=group, group_src=0)
            value.copy_(wire.view(value.dtype).view(value.shape))
            sent.append(slots[place].name)
    return sent


class _Compared:
    """The lowest and highest number of all ranks, of those that have one, by place."""

    def __init__(self, mine: list[int], *, device: torch.device) -> None:
        # the highest as the lowest of the negatives: one all-reduce
        found = torch.tensor([*mine, *(-one for one in mine), *(-one if one != _ABSENT else 0 for one in mine)])
        found = found.to(device)
        with buffer_collectives():
            dist.all_reduce(found, op=dist.ReduceOp.MIN)
        lowest, highest, known = found.view(3, -1).tolist()
        self._lowest, self._highest, self._highest_known = lowest, [-one for one in highest], [-one for one in known]

    def differs(self, place: int) -> bool:
        return bool(self._highest_known[place] > 0 and self._lowest[place] != self._highest_known[place])

    def is_everywhere(self, place: int) -> bool:
        return bool(self._highest[place] != _ABSENT)


def _raw(value: Tensor) -> bytes:
    plain = value.detach().to("cpu").reshape(-1).contiguous()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _form(value: Tensor) -> bytes:
    return f"{tuple(value.shape)} {value.dtype}".encode()


def _digest(data: bytes) -> int:
    """A number between 1 and _ABSENT."""
    return 1 + int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % (_ABSENT - 1)
