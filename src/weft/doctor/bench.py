"""Speed of devices (`weft doctor --bench`), measured by `weft.comm.device_speed` in a process of its own; outliers."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from weft.doctor.check import Diagnosis, ok, shortened, unknown, warning, wrong

_TIMEOUT_S = 300.0
_SLOW, _BROKEN = 0.9, 0.7  # of the median


def measure(num_ranks: int | None) -> dict[str, Any]:
    """The figures of this host; `error` where they could not be measured."""
    command = [sys.executable, "-m", "weft.comm.device_speed", *(["--ranks", str(num_ranks)] if num_ranks else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer for {_TIMEOUT_S:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"exit code {done.returncode}"}
    return found


def judge(records: Sequence[dict[str, Any]]) -> Iterator[Diagnosis]:
    """Devices of the same name on all hosts are compared with each other, and so are pairs of them."""
    measured = [(record["host"], record["bench"]) for record in records if "bench" in record]
    for host, bench in measured:
        if bench.get("error"):
            fix = "WEFT_DEBUG=1 python -m weft.comm.device_speed shows more; a GPU may be stuck"
            yield unknown("bench", f"{host}: {bench['error']}", fix)
    good = [(host, bench) for host, bench in measured if not bench.get("error")]
    if not good:
        return
    several = len(good) > 1
    for key, name, what in (
        ("matmul_flops", "bench.matmul", "matrix product"),
        ("copy_bytes_per_s", "bench.copy", "copy in its memory"),
    ):
        values = {
            (device["name"], f"{host} {device['label']}" if several else device["label"]): device[key]
            for host, bench in good
            for device in bench["devices"]
        }
        yield _outliers(name, what, values)
    pairs = {
        ("pair", f"{host} {pair['label']}" if several else pair["label"]): pair["bytes_per_s"]
        for host, bench in good
        for pair in bench["pairs"]
    }
    if pairs:
        yield _outliers("bench.pairs", "copy between devices", pairs)
    reduced = {
        (f"{bench['all_reduce']['ranks']} ranks", host): bench["all_reduce"]["bus_bytes_per_s"]
        for host, bench in good
        if bench["all_reduce"]
    }
    if reduced:
        yield _outliers("bench.all-reduce", "all-reduce", reduced)


def _outliers(name: str, what: str, values: dict[tuple[str, str], float]) -> Diagnosis:
    """The first part of a key is the group within which the second ones are compared."""
    slow, worst = [], 1.0
    for kind in sorted({kind for kind, _ in values}):
        group = {label: value for (each, label), value in values.items() if each == kind}
        median = statistics.median(group.values())
        for label, value in group.items():
            if value < _SLOW * median:
                slow.append(f"{label} at {value / median:.0%} of the median")
                worst = min(worst, value / median)
    unit, scale = ("TFLOP/s", 1e12) if "matmul" in name else ("GB/s", 1e9)
    typical = f"median {statistics.median(values.values()) / scale:.3g} {unit}"
    if not slow:
        return ok(name, f"{what}: {typical}")
    make = wrong if worst < _BROKEN else warning
    fix = "see its clocks, temperature and power (nvidia-smi -q -d PERFORMANCE), and what else runs there"
    return make(name, f"{what}: {shortened(slow)}; {typical}", fix)
