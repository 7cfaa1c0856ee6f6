"""Quotas of processor time, from folders as the kernel shows them."""

from pathlib import Path

import pytest

from weft.core import processes
from weft.core.cgroup import cpu_quota


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V1 = "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
            },
            3.0,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        (  # in a container the group's own path is not mounted
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_smallest_quota_of_a_group_and_its_parents_counts(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_quota(write(tmp_path, files)) == cores


def test_cores_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for quota, cores in ((None, 8), (2.5, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(processes, "cpu_quota", lambda quota=quota: quota)
        assert processes.num_cores() == cores
