"""The gap between reserved and used memory: measured where there is an allocator, warned about once, with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.train.allocator_gap import AllocatorPeaks, GapWatch, read_allocator
from weft.train.ranks.environment import ALLOCATOR_VARIABLES

GIB = 2**30


def peaks(allocated_bytes: int, reserved_bytes: int) -> AllocatorPeaks:
    return AllocatorPeaks(allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes)


def test_a_cpu_has_no_allocator() -> None:
    assert read_allocator(torch.device("cpu")) is None
    assert GapWatch({}).warning(None) == ""


@pytest.mark.parametrize(
    ("environment", "fix"),
    [
        ({}, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "raise pipeline.microbatches"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "raise pipeline.microbatches"),
    ],
)
def test_the_warning_names_the_fix_and_comes_once(environment: dict[str, str], fix: str) -> None:
    watch = GapWatch(environment)
    assert watch.warning(peaks(91 * GIB, 100 * GIB)) == ""
    warning = watch.warning(peaks(89 * GIB, 100 * GIB))
    assert "reserves 100.0 GiB and tensors use at most 89.0 GiB: 11% is fragmented" in warning
    assert fix in warning
    assert watch.warning(peaks(50 * GIB, 100 * GIB)) == ""


def test_a_small_model_is_not_warned_about() -> None:
    assert GapWatch({}).warning(peaks(2**20, 20 * 2**20)) == ""


def test_torch_reads_the_variables() -> None:
    """They are names inside torch's library: one that is renamed would be set without an effect."""
    library = Path(torch.__file__).parent / "lib"
    found = b"".join(path.read_bytes() for path in library.glob("libc10*.so*"))
    assert all(name.encode() in found for name in ALLOCATOR_VARIABLES)
