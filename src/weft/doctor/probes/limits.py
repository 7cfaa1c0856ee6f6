"""Limits of the process and its container: ulimit, /dev/shm, cores and memory of the cgroup, NUMA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from weft.core.cgroup import cpu_quota
from weft.core.units import format_bytes
from weft.doctor.check import Diagnosis, ok, shortened, unknown, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

UNLIMITED = -1
_LIMITS = {"memlock": "Max locked memory", "files": "Max open files", "processes": "Max processes"}
_LEFTOVER = re.compile(r"^(nccl-|torch_\d|sem\.mp-|psm_|weft)")
_FEW_FILES, _FEW_FILES_OF_CLUSTER = 1024, 16384
_FEW_PROCESSES = 4096
_SMALL_SHM_BYTES = 1 << 30


def read(machine: Machine) -> dict[str, Any]:
    facts: dict[str, Any] = _ulimits(machine.text("/proc/self/limits") or "")
    facts["shm_bytes"] = _size_of_shm(machine.output("df -Pk /dev/shm"))
    facts["shm_leftovers"] = _leftovers(machine)
    facts["cores"] = _count(_field(machine.text("/proc/self/status"), "Cpus_allowed_list"))
    facts["quota"] = cpu_quota(machine.root)
    facts["memory_limit"], facts["pids_limit"] = _memory_limit(machine), _least(machine, "pids.max")
    total = _field(machine.text("/proc/meminfo"), "MemTotal")
    facts["memory_bytes"] = int(total.split()[0]) << 10 if total else 0
    facts["numa_nodes"] = sum(
        re.fullmatch(r"node\d+", name) is not None for name in machine.names("/sys/devices/system/node")
    )
    facts["allowed_nodes"] = _count(_field(machine.text("/proc/self/status"), "Mems_allowed_list"))
    facts["covered_nodes"] = _covered_nodes(machine)
    return facts


def _ulimits(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, title in _LIMITS.items():
        match = re.search(rf"^{title}\s+(\S+)", text, re.MULTILINE)
        found[key] = None if match is None else UNLIMITED if match[1] == "unlimited" else int(match[1])
    return found


def _size_of_shm(table: str | None) -> int | None:
    """The size of the file system that is mounted at /dev/shm; None where there is none."""
    lines = (table or "").strip().splitlines()
    fields = lines[-1].split() if len(lines) > 1 else []
    return int(fields[1]) << 10 if len(fields) > 5 and fields[5] == "/dev/shm" else None


def _leftovers(machine: Machine) -> list[list[Any]]:
    """Files in /dev/shm of communication libraries that no running process has mapped."""
    files = [name for name in machine.names("/dev/shm") if _LEFTOVER.match(name)]
    if not files:
        return []
    processes = [name for name in machine.names("/proc") if name.isdigit()]
    maps = [machine.text(f"/proc/{pid}/maps") for pid in processes]
    if any(text is None for text in maps) and len(processes) > 1:
        return []  # other users' processes may hold them
    held = "\n".join(text or "" for text in maps)
    return [[name, machine.bytes_of(f"/dev/shm/{name}")] for name in files if f"/dev/shm/{name}" not in held]


def _field(text: str | None, name: str) -> str:
    match = re.search(rf"^{name}:\s*(.+)$", text or "", re.MULTILINE)
    return match[1].strip() if match else ""


def _count(ranges: str) -> int:
    """'0-3,8' -> 5."""
    total = 0
    for part in filter(None, ranges.split(",")):
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1
    return total


def _members(ranges: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def _covered_nodes(machine: Machine) -> int:
    """NUMA nodes of which this process may use at least one core."""
    base = "/sys/devices/system/node"
    allowed = _members(_field(machine.text("/proc/self/status"), "Cpus_allowed_list"))
    nodes = [name for name in machine.names(base) if re.fullmatch(r"node\d+", name)]
    return sum(bool(allowed & _members(machine.text(f"{base}/{node}/cpulist") or "")) for node in nodes)


def _least(machine: Machine, name: str) -> int | None:
    """The least of a limit over the process's own cgroup and all above it (version 2)."""
    own = re.search(r"^0::(/\S*)", machine.text("/proc/self/cgroup") or "", re.MULTILINE)
    folder = PurePosixPath(own[1].lstrip("/") if own else "")
    values = [machine.text(f"/sys/fs/cgroup/{part}/{name}") or "" for part in (folder, *folder.parents)]
    return min((int(value) for value in values if value.isdigit()), default=None)


def _memory_limit(machine: Machine) -> int | None:
    old = machine.text("/sys/fs/cgroup/memory/memory.limit_in_bytes") or ""  # version 1
    return int(old) if old.isdigit() and int(old) < 1 << 60 else _least(machine, "memory.max")


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    limits = facts["limits"]
    num_gpus = len(facts["gpu"]["devices"])
    ranks = situation.num_ranks or num_gpus or 1
    yield _files(limits, situation)
    yield _processes(limits, ranks)
    yield _shm_size(limits["shm_bytes"], ranks)
    yield _shm_leftovers(limits["shm_leftovers"])
    yield _cores(limits, ranks)
    yield _memory(limits)
    yield _numa(limits, num_gpus)


def _files(limits: dict[str, Any], situation: Situation) -> Diagnosis:
    name, soft = "limits.files", limits["files"]
    needed = _FEW_FILES_OF_CLUSTER if situation.is_cluster else _FEW_FILES
    if soft is None:
        return unknown(name, "the limit of open files is not known")
    if 0 <= soft < needed:
        fix = "ulimit -n 1048576 (limits.conf, LimitNOFILE of the service): a socket per peer, group and channel"
        return warning(name, f"{soft} open files, {needed} may be needed", fix)
    return ok(name, "open files are not limited" if soft < 0 else f"{soft} open files")


def _processes(limits: dict[str, Any], ranks: int) -> Diagnosis:
    name, soft, pids = "limits.processes", limits["processes"], limits["pids_limit"]
    needed = max(_FEW_PROCESSES if ranks > 1 else 512, 256 * ranks)
    least = min(value for value in (soft if soft is not None and soft >= 0 else 1 << 30, pids or 1 << 30))
    if soft is None and pids is None:
        return unknown(name, "the limit of processes is not known")
    if least < needed:
        by = "pids.max of the cgroup" if pids == least else "ulimit -u"
        return warning(name, f"{least} processes and threads ({by}), {needed} may be needed", f"raise {by}")
    return ok(name, "enough processes and threads")


def _shm_size(size: int | None, ranks: int) -> Diagnosis:
    name, fix = "shm.size", "docker run --shm-size=16g; Kubernetes: emptyDir with medium Memory at /dev/shm"
    if size is None:
        return unknown(name, "no file system at /dev/shm", fix)
    if size < _SMALL_SHM_BYTES:
        state = wrong if ranks > 1 else warning
        return state(name, f"/dev/shm has {format_bytes(size)}: NCCL and data loaders fail with bus errors", fix)
    return ok(name, format_bytes(size))


def _shm_leftovers(files: list[list[Any]]) -> Diagnosis:
    if not files:
        return ok("shm.leftovers", "none")
    detail = f"{len(files)} files of ended jobs, {format_bytes(sum(size for _, size in files))}"
    names = shortened(name for name, _ in files)
    return warning("shm.leftovers", f"{detail}: {names}", "remove them from /dev/shm while no job runs")


def _cores(limits: dict[str, Any], ranks: int) -> Diagnosis:
    name, cores, quota = "cpu.cores", limits["cores"], limits["quota"]
    if not cores:
        return unknown(name, "the number of cores is not known")
    usable = min(cores, quota) if quota else cores
    if quota and quota < cores:
        threads = max(1, int(usable // ranks))
        fix = (
            f"OMP_NUM_THREADS={threads} for {ranks} ranks: threads by the cores seen are throttled; or raise the quota"
        )
        return warning(name, f"{cores} cores are visible, the cgroup allows {quota:g}", fix)
    if usable < ranks:
        return warning(
            name, f"{usable:g} cores for {ranks} ranks", "a core per rank at least: --cpus-per-task of Slurm"
        )
    return ok(name, f"{cores} cores")


def _memory(limits: dict[str, Any]) -> Diagnosis:
    limit, total = limits["memory_limit"], limits["memory_bytes"]
    if not total:
        return unknown("memory.limit", "the size of memory is not known")
    if limit and limit < total:
        detail = f"{format_bytes(limit)} of {format_bytes(total)}"
        if limit < 2 << 30:
            fix = "raise the memory limit of the container: importing torch alone takes over 0.5 GiB per rank"
            return wrong("memory.limit", f"the cgroup allows {detail}", fix)
        return ok("memory.limit", f"the cgroup allows {detail}: offload is planned against that")
    return ok("memory.limit", format_bytes(total))


def _numa(limits: dict[str, Any], num_gpus: int) -> Diagnosis:
    nodes, covered = limits["numa_nodes"], limits["covered_nodes"]
    if nodes <= 1:
        return ok("numa", "one node")
    if num_gpus > 1 and covered < nodes:
        fix = "srun --cpu-bind=none or --cpus-per-task for all cores; then bind each rank to its GPU's node"
        return warning("numa", f"cores of {covered} of {nodes} NUMA nodes are allowed, GPUs are on all", fix)
    return ok("numa", f"{nodes} nodes")
