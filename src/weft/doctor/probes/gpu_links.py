"""Links of GPUs: NVLink (`nvidia-smi nvlink -s`), topology (`nvidia-smi topo -m`), Xid errors in the kernel's log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from weft.doctor.check import Diagnosis, ok, shortened, unknown, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

# Xid number -> what it says; those not listed are errors of a program, not of the machine.
BROKEN_XIDS = {
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    64: "memory rows could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    140: "unrecovered memory error",
}
SUSPECT_XIDS = {63: "memory rows were remapped", 92: "many corrected memory errors", 94: "contained memory error"}
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def read(machine: Machine) -> dict[str, Any]:
    if not machine.has("/proc/driver/nvidia/version"):
        return {}
    links = machine.output("nvidia-smi nvlink -s")
    topology = machine.output("nvidia-smi topo -m")
    log = machine.output("dmesg")
    return {
        "links": parse_links(links) if links is not None else None,
        "topology": parse_topology(topology) if topology is not None else None,
        "xids": [[bus, int(number)] for bus, number in _XID.findall(log)] if log is not None else None,
    }


def parse_links(text: str) -> dict[str, list[float]]:
    """GPU -> GB/s of each link, 0 for an inactive one."""
    gpus: dict[str, list[float]] = {}
    current: list[float] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            current = gpus.setdefault(match[1], [])
        elif match := re.match(r"\s+Link \d+: (.+)", line):
            speed = re.match(r"[\d.]+", match[1])
            current.append(float(speed[0]) if speed else 0.0)
    return gpus


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Row device -> column device -> connection, of GPUs and NICs."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    header = next((line for line in lines if "GPU0" in line), "")
    columns = [name for name in header.split() if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+|bnxt\w+|ib\w+", name)]
    rows = {}
    for line in lines:
        words = line.split()
        if words and words[0] in columns and len(words) > len(columns):
            rows[words[0]] = dict(zip(columns, words[1:], strict=False))
    return rows


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    found = facts["gpu_links"]
    if not found or not facts["gpu"]["devices"]:
        return
    yield _nvlink(found["links"])
    if found["topology"] is not None:
        yield from _topology(found["topology"])
    yield _xids(found["xids"])


def _nvlink(links: dict[str, list[float]] | None) -> Diagnosis:
    if links is None:
        return unknown("gpu.nvlink", "nvidia-smi nvlink -s gave no answer")
    with_links = {gpu: speeds for gpu, speeds in links.items() if any(speeds)}
    if not with_links:
        return ok("gpu.nvlink", "no NVLink")
    counts = {gpu: sum(speed > 0 for speed in links.get(gpu, [])) for gpu in links}
    most, best = max(counts.values()), max(max(speeds) for speeds in with_links.values())
    down = [f"GPU {gpu}: {count} of {most} links up" for gpu, count in counts.items() if count < most]
    slow = [
        f"GPU {gpu}: {sum(0 < speed < best for speed in speeds)} links below {best:g} GB/s"
        for gpu, speeds in links.items()
        if any(0 < speed < best for speed in speeds)
    ]
    if down or slow:
        return wrong(
            "gpu.nvlink", shortened([*down, *slow]), "reset the GPUs, restart the fabric manager; else the board"
        )
    return ok("gpu.nvlink", f"{most} links of {best:g} GB/s on each GPU")


def _topology(rows: dict[str, dict[str, str]]) -> Iterator[Diagnosis]:
    gpus = [name for name in rows if name.startswith("GPU")]
    pairs = {(a, b): rows[a].get(b, "?") for a in gpus for b in gpus if a < b}
    with_nvlink = {pair: kind for pair, kind in pairs.items() if kind.startswith("NV")}
    if with_nvlink and len(set(pairs.values())) > 1:
        usual, _ = Counter(with_nvlink.values()).most_common(1)[0]
        others = [f"{a}-{b} {kind}" for (a, b), kind in pairs.items() if kind != usual]
        fix = "put ranks that talk most (tp) on pairs with NVLink; else check nvidia-smi nvlink -s"
        yield warning("gpu.topology", f"not all pairs are {usual}: {shortened(others)}", fix)
    elif pairs:
        kinds = ", ".join(sorted(set(pairs.values())))
        yield ok("gpu.topology", f"all {len(pairs)} pairs: {kinds}")
    nics = [name for name in (rows[gpus[0]] if gpus else {}) if not name.startswith("GPU")]
    far = [gpu for gpu in gpus if nics and all(rows[gpu].get(nic) == "SYS" for nic in nics)]
    if far and len(far) < len(gpus):
        fix = "check the slot of its network card: traffic of these GPUs crosses the CPU sockets"
        yield warning("gpu.nic", f"no near network card: {', '.join(far)}", fix)
    elif nics:
        yield ok("gpu.nic", f"{len(nics)} network cards")


def _xids(xids: list[list[Any]] | None) -> Diagnosis:
    name = "gpu.xid"
    if xids is None:
        return unknown(name, "the kernel's log is not readable", "run as root, or sysctl kernel.dmesg_restrict=0")
    for table, make in ((BROKEN_XIDS, wrong), (SUSPECT_XIDS, warning)):
        found = sorted({(number, bus) for bus, number in xids if number in table})
        if found:
            detail = shortened(f"Xid {number} ({table[number]}) on {bus}" for number, bus in found)
            return make(name, detail, "drain the host, reset or replace the GPU; the vendor's Xid catalogue says more")
    others = {number for _, number in xids}
    return ok(name, "none" if not others else f"only errors of programs: Xid {', '.join(map(str, sorted(others)))}")
