"""Records of several hosts compared: what should be equal and is not, with the hosts that differ from the most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.units import format_bytes
from weft.doctor.check import WARNING, WRONG, Diagnosis, ok, shortened, warning, wrong

Record = dict[str, Any]
_MEMORY_STEP = 16 << 30  # the kernel reserves a little more or less on equal hosts
# Differ between hosts on purpose, or follow from the launcher.
_OWN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "WEFT_HOST"})


@dataclass(frozen=True, kw_only=True)
class Equal:
    """A fact that should be the same on all hosts; `read` gives None where it is not known."""

    name: str
    what: str
    read: Callable[[Record], Any]
    state: str
    fix: str


EQUAL = (
    Equal(
        name="hosts.weft",
        what="weft",
        read=lambda record: f"{record['software']['weft']}, code {record['software']['weft_code']}",
        state=WRONG,
        fix="install the same weft everywhere, or share the folder of its code",
    ),
    Equal(
        name="hosts.python",
        what="Python",
        read=lambda record: ".".join(record["software"]["python"].split(".")[:2]),
        state=WRONG,
        fix="use the same Python on all hosts",
    ),
    Equal(
        name="hosts.torch",
        what="torch",
        read=lambda record: record["software"]["torch"],
        state=WRONG,
        fix="install the same torch everywhere: its collectives and checkpoints must match",
    ),
    Equal(
        name="hosts.nccl",
        what="NCCL",
        read=lambda record: record["software"]["nccl"] or None,
        state=WRONG,
        fix="install the same nvidia-nccl package: NCCL of another version is refused, or hangs",
    ),
    Equal(
        name="hosts.transformers",
        what="transformers",
        read=lambda record: record["software"]["transformers"],
        state=WRONG,
        fix="install the same transformers: model code differs between versions",
    ),
    Equal(
        name="hosts.driver",
        what="NVIDIA driver",
        read=lambda record: record["gpu"].get("driver"),
        state=WARNING,
        fix="update the others: kernels may differ in speed, and only some hosts get a fix",
    ),
    Equal(
        name="hosts.gpus",
        what="GPUs",
        read=lambda record: _counted(device["name"] for device in record["gpu"]["devices"]),
        state=WARNING,
        fix="give hosts with other GPUs their own number of ranks, or leave them out",
    ),
    Equal(
        name="hosts.clocks",
        what="clocks and power limits of GPUs",
        read=lambda record: _counted(_clocks(device) for device in record["gpu"]["devices"]),
        state=WARNING,
        fix="nvidia-smi -rac and -pl with one limit: the slowest GPU sets the speed of all",
    ),
    Equal(
        name="hosts.fabric",
        what="RDMA ports",
        read=lambda record: _counted(f"{port['layer']} {port['rate_gbit']:g} Gb/s" for port in _active(record)),
        state=WARNING,
        fix="see the ports of the hosts that differ: the slowest link sets the speed of all",
    ),
    Equal(
        name="hosts.mtu",
        what="MTU of the default route",
        read=lambda record: _of_route(record, "mtu"),
        state=WRONG,
        fix="ip link set dev ... mtu: connections open, and then hang with the first large message",
    ),
    Equal(
        name="hosts.speed",
        what="speed of the default route",
        read=lambda record: _of_route(record, "mbit"),
        state=WARNING,
        fix="cable or switch port of the slower ones",
    ),
    Equal(
        name="hosts.cores",
        what="usable cores",
        read=lambda record: min(record["limits"]["cores"], record["limits"]["quota"] or 1 << 30) or None,
        state=WARNING,
        fix="ask for equal hosts: the slowest sets the speed of all",
    ),
    Equal(
        name="hosts.memory",
        what="memory",
        read=lambda record: (
            format_bytes(round(_memory(record) / _MEMORY_STEP) * _MEMORY_STEP)
            if _memory(record) >= 4 * _MEMORY_STEP
            else None
        ),
        state=WARNING,
        fix="plan offload for the smallest",
    ),
    Equal(
        name="hosts.kind of disk",
        what="file system of the run folder",
        read=lambda record: record["disk"]["kind"] or None,
        state=WARNING,
        fix="mount the same share on all hosts",
    ),
)


def compare(records: Sequence[Record]) -> list[Diagnosis]:
    """Comparisons of two or more records."""
    found = [_names(records)]
    for equal in EQUAL:
        found.append(_compared(equal, records))
    found.append(_packages(records))
    found += _variables(records)
    return found


def _compared(equal: Equal, records: Sequence[Record]) -> Diagnosis:
    by_value: dict[str, list[str]] = defaultdict(list)
    for record in records:
        try:
            value = equal.read(record)
        except KeyError:  # a probe that failed there, which is reported
            value = None
        by_value["" if value is None else str(value)].append(record["host"])
    by_value.pop("", None)
    if len(by_value) < 2:
        return ok(equal.name, f"{equal.what}: {next(iter(by_value))}" if by_value else f"{equal.what}: not reported")
    make = wrong if equal.state == WRONG else warning
    return make(equal.name, f"{equal.what}: {_grouped(by_value)}", equal.fix)


def _grouped(by_value: dict[str, list[str]]) -> str:
    """The usual value with a count, then the hosts that have another."""
    usual = max(by_value, key=lambda value: len(by_value[value]))
    others = [f"{value or 'none'} on {_few(hosts)}" for value, hosts in by_value.items() if value != usual]
    return f"{shortened(others)}; {usual or 'none'} on the other {len(by_value[usual])}"


def _few(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:6]) + (f" and {len(hosts) - 6} more" if len(hosts) > 6 else "")


def _names(records: Sequence[Record]) -> Diagnosis:
    own = Counter(record.get("network", {}).get("name", "") for record in records)
    twice = [name for name, count in own.items() if name and count > 1]
    if twice:
        fix = "give each host a name of its own; or the list names a machine twice"
        return wrong("hosts.names", f"hosts with the same name: {_few(twice)}", fix)
    return ok("hosts.names", f"{len(records)} hosts")


def _packages(records: Sequence[Record]) -> Diagnosis:
    """The digest of all packages, and the names of those that differ."""
    name, versions = "hosts.packages", [record.get("software", {}).get("packages", {}) for record in records]
    if len({record.get("software", {}).get("digest") for record in records}) < 2:
        return ok(name, "the same packages on all")
    differing = []
    for package in sorted(set().union(*versions)):
        found = {each.get(package, "none") for each in versions}
        if len(found) > 1:
            differing.append(f"{package} ({', '.join(sorted(found))})")
    fix = "one image, or pip install with constraints.txt, on all hosts"
    return warning(name, f"packages differ: {shortened(differing, most=6)}", fix)


def _variables(records: Sequence[Record]) -> Iterator[Diagnosis]:
    given = [record.get("variables", {}).get("set", {}) for record in records]
    is_quiet = True
    for variable in sorted(set().union(*given) - _OWN_VARIABLES):
        by_value: dict[str, list[str]] = defaultdict(list)
        for record, variables in zip(records, given, strict=True):
            by_value[variables.get(variable, "not set")].append(record["host"])
        if len(by_value) > 1:
            is_quiet = False
            fix = "set it on all hosts or on none: ranks that do not agree hang in their first collective"
            yield warning("hosts.variables", f"{variable}: {_grouped(by_value)}", fix)
    if is_quiet:
        yield ok("hosts.variables", "the same variables on all")


def _counted(items: Any) -> str:
    counts = Counter(items)
    return ", ".join(f"{count} x {item}" for item, count in sorted(counts.items())) or "none"


def _clocks(device: Record) -> str:
    return f"{device['set_clock_mhz'] or device['max_clock_mhz']} MHz, {device['power_limit_w']} W"


def _active(record: Record) -> list[Record]:
    return [port for port in record["rdma"]["ports"] if port["state"] == "ACTIVE"]


def _of_route(record: Record, key: str) -> Any:
    return record["network"]["interfaces"].get(record["network"]["route"], {}).get(key)


def _memory(record: Record) -> int:
    limits = record["limits"]
    return int(min(limits["memory_bytes"], limits["memory_limit"] or limits["memory_bytes"]))
