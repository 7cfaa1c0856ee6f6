"""Whether a dry run fits a device: what counts, to the byte, and whose kernels it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dry_run_cases import found_of

from weft import hardware
from weft.dryrun.fit import attention_of, fit_of, is_cpu
from weft.dryrun.many import DryRunJob

H200 = hardware.cluster("H200").device


def test_reserved_and_overhead_count_to_the_byte() -> None:
    most = H200.memory_bytes - H200.overhead_bytes
    exact, over = (found_of(reserved_bytes={"expandable_segments": size}) for size in (most, most + 1))
    assert fit_of(exact, H200).fits
    assert fit_of(exact, H200).free_bytes == 0
    assert not fit_of(over, H200).fits
    assert fit_of(over, H200).free_bytes == -1


def test_another_moment_can_be_the_worst() -> None:
    found = found_of(reserved_bytes={"expandable_segments": 10}, moments={"loading_bytes": 30, "saving_host_bytes": 99})
    assert fit_of(found, H200).needed_bytes == 30 + H200.overhead_bytes


def test_a_cpu_reserves_nothing() -> None:
    cpu = hardware.cluster("CPU").device
    assert is_cpu(cpu)
    found = found_of(reserved_bytes={})
    assert fit_of(found, cpu).needed_bytes == found.peak_bytes + cpu.overhead_bytes


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("H200", "cudnn"), ("H100-80GB", "cudnn"), ("B200", "cudnn"), ("A100-40GB", "flash"), ("L40S", "flash")],
)
def test_kernels_are_the_devices(name: str, kernel: str) -> None:
    from weft.core.plan import Plan
    from weft.core.run_spec import RunSpec

    device = hardware.cluster(name).device
    assert attention_of(device) == kernel
    job = DryRunJob.on(device, RunSpec.default(), Plan(), rank=3)
    assert (job.on_gpu, job.attention, job.rank) == (True, kernel, 3)
    assert not DryRunJob.on(hardware.cluster("CPU").device, RunSpec.default(), Plan()).on_gpu


def test_extra_bytes_move_the_verdict() -> None:
    found = found_of()
    tight = replace(H200, memory_bytes=found.reserved_bytes["expandable_segments"] + H200.overhead_bytes)
    assert fit_of(found, tight).fits
    assert not fit_of(found, replace(tight, memory_bytes=tight.memory_bytes - 1)).fits


def test_between_its_least_and_what_it_would_keep_the_allocator_is_tight() -> None:
    free = H200.memory_bytes - H200.overhead_bytes
    found = replace(found_of(reserved_bytes={"expandable_segments": free + 10}), least_bytes=free - 10)
    assert fit_of(found, H200).fits
    assert fit_of(found, H200).is_tight
    assert not fit_of(replace(found, least_bytes=free + 1), H200).fits
    roomy = replace(found, reserved_bytes={"expandable_segments": free})
    assert not fit_of(roomy, H200).is_tight
