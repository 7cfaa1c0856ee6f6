"""The processor time that control groups allow this process, in cores. Reads files below `root`, versions 1 and 2.

quota of a group = cpu.max (v2), cpu.cfs_quota_us / cpu.cfs_period_us (v1); the smallest of the group and its parents
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time per second; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    mounts = root / "sys/fs/cgroup"
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _quotas(_folders(mounts, path), _read_v2)
            found += _quotas(_folders(mounts / "unified", path), _read_v2)
        elif "cpu" in controllers.split(","):
            found += _quotas(_folders(mounts / controllers, path), _read_v1)
            found += _quotas(_folders(mounts / "cpu", path), _read_v1)
    return min(found, default=None)


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and its parents' up to the mount; in a container only the last ones exist."""
    inner = PurePosixPath(path.lstrip("/"))
    for part in (inner, *inner.parents):
        yield mount / part


def _quotas(folders: Iterator[Path], read: Callable[[Path], float | None]) -> list[float]:
    return [quota for folder in folders if (quota := read(folder)) is not None]


def _read_v2(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _read_v1(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
