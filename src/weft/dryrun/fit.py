"""Whether a dry run fits a device: the allocator's memory and the overhead outside it against the device's memory.

    needed = max(the allocator's least, loading, evaluation, resuming) + overhead of the device

The allocator reserves more than its least if there is room (`wanted`); between the two it must return and reserve
cached memory in every step, which is slow. On a CPU nothing is reserved: the peak is used instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.core.cluster import Device
from weft.dryrun.record import DryRun

EXPANDABLE, FIXED = "expandable_segments", "fixed_segments"
# Devices on which torch does not prefer cuDNN's attention: NVIDIA's before Hopper, and AMD's.
WITHOUT_CUDNN = ("A10", "L4", "RTX30", "RTX40", "T4", "V100", "MI")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One rank on one device."""

    device: str
    capacity_bytes: int
    needed_bytes: int
    wanted_bytes: int  # with all memory that the allocator would cache

    @property
    def is_tight(self) -> bool:
        """Whether it fits only if the allocator returns cached memory in every step."""
        return self.fits and self.wanted_bytes > self.capacity_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Negative if it does not fit."""
        return self.capacity_bytes - self.needed_bytes


def fit_of(found: DryRun, device: Device) -> Fit:
    reserved = found.reserved_bytes.get(EXPANDABLE, found.peak_bytes)
    least = found.least_bytes if found.least_bytes is not None else reserved
    moments = device_moments(found).values()
    return Fit(
        device=device.name,
        capacity_bytes=device.memory_bytes,
        needed_bytes=max(least, *moments) + device.overhead_bytes,
        wanted_bytes=max(reserved, *moments) + device.overhead_bytes,
    )


def device_moments(found: DryRun) -> dict[str, int]:
    """Device peaks of the other moments of a run, by name; host memory is not included."""
    names = {"loading_bytes": "loading", "evaluation_bytes": "evaluation", "resuming_bytes": "resuming"}
    return {name: found.moments.get(key, 0) for key, name in names.items()}


def attention_of(device: Device) -> Literal["cudnn", "flash"]:
    """The fused attention that torch prefers on the device."""
    return "flash" if device.name.upper().startswith(WITHOUT_CUDNN) else "cudnn"


def is_cpu(device: Device) -> bool:
    return device.name.upper().startswith("CPU")
