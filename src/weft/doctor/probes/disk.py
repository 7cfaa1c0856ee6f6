"""The disk of the run folder: free space, kind of file system, O_DIRECT, and a short measurement of its speed."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.core.units import format_bytes
from weft.doctor.check import Diagnosis, ok, unknown, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "cifs", "weka", "glusterfs", "virtiofs", "orangefs")
_VANISHING = ("tmpfs", "ramfs")
_LITTLE_BYTES = 10 << 30
_SLOW_BYTES_PER_S = 100e6
_PIECE_BYTES, _MOST_BYTES, _PATIENCE_S = 4 << 20, 32 << 20, 0.2


def read(machine: Machine) -> dict[str, Any]:
    folder = machine.existing_folder()
    table = machine.output(f"df -Pk {folder}") if " " not in str(folder) else None
    lines = (table or "").strip().splitlines()
    fields = lines[-1].split() if len(lines) > 1 else []
    mount = fields[5] if len(fields) > 5 else ""
    facts: dict[str, Any] = {"folder": str(machine.folder), "free_bytes": int(fields[3]) << 10 if mount else None}
    facts["kind"] = _kind(machine.text("/proc/mounts") or "", mount)
    facts.update((machine.measure_disk or measure)(machine.root / str(folder).lstrip("/")))
    return facts


def _kind(mounts: str, mount: str) -> str:
    """The file system mounted there; the last mount hides the earlier ones."""
    kinds = [line.split()[2] for line in mounts.splitlines() if len(line.split()) > 2 and line.split()[1] == mount]
    return kinds[-1] if kinds else ""


def measure(folder: Path) -> dict[str, Any]:
    """Write up to 32 MiB in at most 0.2 s, with O_DIRECT where the file system has it; the file is removed."""
    path = folder / f".weft-doctor-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError as error:
        return {"write_bytes_per_s": None, "direct": None, "error": error.strerror or str(error)}
    try:
        try:
            descriptor, direct = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
        except OSError:
            descriptor, direct = os.open(path, os.O_WRONLY), False
        try:
            return {"write_bytes_per_s": _write(descriptor), "direct": direct, "error": ""}
        finally:
            os.close(descriptor)
    except OSError as error:
        return {"write_bytes_per_s": None, "direct": None, "error": error.strerror or str(error)}
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(descriptor: int) -> float:
    """Bytes per second, with the time to reach the disk."""
    with mmap.mmap(-1, _PIECE_BYTES) as piece:  # aligned to pages, as O_DIRECT needs
        piece.write(os.urandom(4096) * (_PIECE_BYTES // 4096))
        started, written = time.perf_counter(), 0
        while written < _MOST_BYTES and time.perf_counter() - started < _PATIENCE_S:
            written += os.write(descriptor, piece)
        os.fsync(descriptor)
        return written / (time.perf_counter() - started)


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    disk = facts["disk"]
    folder, free = disk["folder"], disk["free_bytes"]
    if disk["error"]:
        yield wrong("disk.write", f"{folder} cannot be written: {disk['error']}", "choose another --out")
    if free is None:
        yield unknown("disk.space", f"the free space of {folder} is not known")
    elif free < _LITTLE_BYTES:
        fix = "free some space, or choose another --out: a checkpoint of an 8B model with AdamW takes 96 GB"
        state = wrong if free < 1 << 30 else warning
        yield state("disk.space", f"{format_bytes(free)} free at {folder}", fix)
    else:
        yield ok("disk.space", f"{format_bytes(free)} free at {folder}")
    yield _kind_of_disk(disk, situation)
    speed = disk["write_bytes_per_s"]
    if speed is None:
        return
    if speed < _SLOW_BYTES_PER_S:
        fix = "checkpoints and states in files wait for it: use a local NVMe disk or a faster share"
        yield warning("disk.speed", f"writes {format_bytes(speed)}/s to {folder}", fix)
    else:
        yield ok("disk.speed", f"writes {format_bytes(speed)}/s" + ("" if disk["direct"] else ", without O_DIRECT"))


def _kind_of_disk(disk: dict[str, Any], situation: Situation) -> Diagnosis:
    kind, folder = disk["kind"], disk["folder"]
    if kind in _VANISHING:
        fix = "choose another --out: checkpoints there take memory and do not outlive the host"
        return warning("disk.kind", f"{folder} is in memory ({kind})", fix)
    if disk["direct"] is False:
        return ok(
            "disk.kind", f"{kind or 'unknown kind'}, without O_DIRECT: offload to files goes through the page cache"
        )
    if situation.is_cluster and kind and not kind.startswith(_SHARED):
        return ok("disk.kind", f"{kind}, which is local: --out of several hosts must be shared")
    return ok("disk.kind", kind or "not reported")
