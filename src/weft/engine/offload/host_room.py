"""Refuses states that do not fit the host's memory, before any is allocated: a killed rank reports nothing.

    available = min(MemAvailable, limit of the cgroup - its use without reclaimable pages)

Ranks of one machine are added up, so all ranks come to the same answer.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from weft.core.errors import DeviceError
from weft.core.units import format_bytes

_UNKNOWN = 2**62
_HINT = (
    "shard them over more machines (data_parallel.zero), set precision.optimizer_state = 'bfloat16', "
    "or raise the memory limit of the container"
)


def require_room(
    nbytes: int,
    *,
    device: torch.device,
    root: Path = Path("/"),
    terms: Mapping[str, int] | None = None,
    what: str = "offloaded optimizer states",
    hint: str = _HINT,
) -> None:
    """Refuse on every rank if one machine lacks the memory. Collective. `terms`: of this rank, by name."""
    available = available_bytes(root)
    own = [zlib.crc32(platform.node().encode()), nbytes, _UNKNOWN if available is None else available]
    rows = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(own, dtype=torch.int64, device=device))
    needed: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    for machine, of_rank, free in (row.tolist() for row in rows):
        needed.setdefault(machine, []).append(of_rank)
        left[machine] = min(left.get(machine, _UNKNOWN), free)
    for machine, of_ranks in needed.items():
        if sum(of_ranks) > left[machine]:
            ranks = "1 rank" if len(of_ranks) == 1 else f"{len(of_ranks)} ranks of one machine"
            raise DeviceError(
                f"the {what} of {ranks} need {format_bytes(sum(of_ranks))} of host memory, and "
                f"{format_bytes(left[machine])} are available{_by_name(terms or {})}",
                hint=hint,
            )


def _by_name(terms: Mapping[str, int]) -> str:
    named = [f"{name} {format_bytes(size)}" for name, size in terms.items() if size]
    return f" ({', '.join(named)} of this rank)" if named else ""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; None if the system does not tell."""
    found = [*_of_machine(root), *_of_cgroups(root)]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> list[int]:
    lines = _read(root / "proc/meminfo").splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _of_cgroups(root: Path) -> list[int]:
    """What the limits leave: of this process's group and its parents (version 2), or of version 1."""
    base = root / "sys/fs/cgroup"
    own = next((line[3:] for line in _read(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    folder = base / own.lstrip("/")
    folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
    found = [_left(each / "memory.max", each / "memory.current", each / "memory.stat") for each in folders]
    old = base / "memory"
    found.append(_left(old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat"))
    return [left for left in found if left is not None]


def _left(limit: Path, used: Path, statistics: Path) -> int | None:
    most, now = _read(limit).strip(), _read(used).strip()
    if not most.isdigit() or not now.isdigit():
        return None
    pages = (line.split() for line in _read(statistics).splitlines())
    reclaimable = next((int(words[1]) for words in pages if words[0] in ("inactive_file", "total_inactive_file")), 0)
    return int(most) - int(now) + reclaimable


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
