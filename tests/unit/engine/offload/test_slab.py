"""Host memory of offloaded states: the slab, who knows of it, and what does not fit."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.comm.groups import ensure_group
from weft.core.errors import DeviceError
from weft.engine.measure.meter import measure_peak
from weft.engine.offload.host_room import available_bytes, require_room
from weft.engine.offload.slab import ALIGNMENT_BYTES, HostSlab, is_host_memory, slab_bytes

CPU = torch.device("cpu")


def test_a_slab_gives_aligned_zeros_that_do_not_overlap() -> None:
    sizes = [(5, torch.float32), (0, torch.float32), (7, torch.bfloat16), (300, torch.float32)]
    slab = HostSlab(sum(slab_bytes(count, dtype) for count, dtype in sizes), device=CPU)
    taken = [slab.take(count, dtype) for count, dtype in sizes]
    assert [(one.numel(), one.dtype) for one in taken] == sizes
    assert not any(one.any() for one in taken)
    assert all((one.storage_offset() * one.element_size()) % ALIGNMENT_BYTES == 0 for one in taken)
    for value, one in enumerate(taken, start=1):
        one.fill_(value)
    assert [set(one.tolist()) for one in taken] == [{1.0}, set(), {3.0}, {4.0}]


def test_only_a_living_slab_is_host_memory() -> None:
    slab = HostSlab(1024, device=CPU)
    view = slab.take(4, torch.float32)
    assert is_host_memory(view)
    assert is_host_memory(view[1:])
    assert not is_host_memory(torch.zeros(4))
    del slab
    gc.collect()
    assert not is_host_memory(view)


def test_the_tracker_does_not_count_it_and_fake_tensors_allocate_nothing() -> None:
    with FakeTensorMode():
        assert measure_peak(lambda: HostSlab(2**40, device=torch.device("cuda")), device_type="cpu") == 0
        assert measure_peak(lambda: torch.zeros(2**20, dtype=torch.uint8), device_type="cpu") == 2**20


def tree(root: Path, *, free_kib: int, limit: str = "max", used: int = 0, cached: int = 0) -> Path:
    """A file system with the memory of a machine and of a container."""
    group = root / "sys/fs/cgroup/jobs/one"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {free_kib} kB\n", encoding="utf-8")
    (root / "proc/self/cgroup").write_text("0::/jobs/one\n", encoding="utf-8")
    (group / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
    (group / "memory.current").write_text(f"{used}\n", encoding="utf-8")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n", encoding="utf-8")
    return root


def test_available_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path / "a", free_kib=64)) == 65536
    assert available_bytes(tree(tmp_path / "b", free_kib=64, limit="50000", used=30000, cached=10000)) == 30000
    assert available_bytes(tree(tmp_path / "c", free_kib=64, limit="50000", used=60000)) == 0
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("900", encoding="utf-8")
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("100", encoding="utf-8")
    assert available_bytes(tmp_path) == 800
    assert available_bytes(tmp_path / "nowhere") is None


def test_states_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path) -> None:
    ensure_group(device_type="cpu")
    root = tree(tmp_path, free_kib=1024)
    require_room(2**20, device=CPU, root=root)
    sentence = r"states of 1 rank need 2\.0 MiB of host memory, and 1\.0 MiB are available"
    with pytest.raises(DeviceError, match=sentence) as caught:
        require_room(2**21, device=CPU, root=root)
    assert "precision.optimizer_state" in caught.value.hint
    dist.destroy_process_group()
