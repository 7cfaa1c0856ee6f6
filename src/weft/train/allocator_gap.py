"""The gap between memory that the CUDA allocator reserves and memory that tensors use, both at their peaks.

Read every step from the allocator's own counters, without a synchronisation. A large gap is fragmentation: memory that
is reserved, and that no tensor of the right size or stream can use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.core.units import format_bytes
from weft.train.ranks.environment import ALLOCATOR_VARIABLES

MOST_IDLE_SHARE = 0.10
LEAST_IDLE_BYTES = 512 * 2**20  # segments are 20 MiB: in a small model most of one may be idle


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """Peaks of this process since its start."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def idle_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes

    @property
    def is_fragmented(self) -> bool:
        return self.idle_bytes > max(MOST_IDLE_SHARE * self.reserved_bytes, LEAST_IDLE_BYTES)


def read_allocator(device: torch.device) -> AllocatorPeaks | None:
    """None on a CPU, which has no caching allocator."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return AllocatorPeaks(
        allocated_bytes=stats.get("allocated_bytes.all.peak", 0), reserved_bytes=stats.get("reserved_bytes.all.peak", 0)
    )


class GapWatch:
    """Warns once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        settings = [environment[name] for name in ALLOCATOR_VARIABLES if name in environment]
        self._is_expandable = any("expandable_segments:True" in setting for setting in settings)
        self._has_warned = False

    def warning(self, peaks: AllocatorPeaks | None) -> str:
        """The warning, or ""."""
        if peaks is None or self._has_warned or not peaks.is_fragmented:
            return ""
        self._has_warned = True
        share = peaks.idle_bytes / peaks.reserved_bytes
        fix = (
            "raise pipeline.microbatches, so that tensors are smaller"
            if self._is_expandable
            else "set PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
        return (
            f"warning: the allocator reserves {format_bytes(peaks.reserved_bytes)} and tensors use at most "
            f"{format_bytes(peaks.allocated_bytes)}: {share:.0%} is fragmented; {fix}"
        )
