"""InfiniBand and RoCE ports from sysfs (what ibstat, ibv_devinfo, `rdma link` and show_gids print), and GPUDirect.

No tool is needed: containers rarely have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from weft.doctor.check import Diagnosis, ok, shortened, unknown, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_BASE = "/sys/class/infiniband"
_EMPTY_GID = re.compile(r"^(0000:){7}0000$|^fe80(:0000){7}$")
_ROCE_MTU = 4200  # RDMA packets of 4096 bytes fit
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def read(machine: Machine) -> dict[str, Any]:
    ports = [
        _port(machine, device, port)
        for device in machine.names(_BASE)
        for port in machine.names(f"{_BASE}/{device}/ports")
    ]
    driver = machine.text("/proc/driver/nvidia/version") or ""
    modules = machine.names("/sys/module")
    return {
        "ports": ports,
        "nodes": machine.names("/dev/infiniband"),
        "peer_module": next((name for name in _PEER_MODULES if name in modules), ""),
        "open_driver": "Open Kernel Module" in driver,
        "kernel": machine.text("/proc/sys/kernel/osrelease") or "",
    }


def _port(machine: Machine, device: str, port: str) -> dict[str, Any]:
    base = f"{_BASE}/{device}/ports/{port}"
    gids = []
    for index in sorted(machine.names(f"{base}/gids"), key=lambda name: int(name) if name.isdigit() else 0):
        gid = machine.text(f"{base}/gids/{index}") or ""
        if gid and not _EMPTY_GID.match(gid):
            gids.append(f"{index}: {gid} {machine.text(f'{base}/gid_attrs/types/{index}') or ''}".rstrip())
    netdev = next(iter(machine.names(f"{_BASE}/{device}/device/net")), "")
    return {
        "name": f"{device}:{port}",
        "state": _after_colon(machine.text(f"{base}/state")),
        "physical": _after_colon(machine.text(f"{base}/phys_state")),
        "rate_gbit": _rate(machine.text(f"{base}/rate")),
        "layer": machine.text(f"{base}/link_layer") or "",
        "gids": gids,
        "interface": netdev,
        "mtu": _int(machine.text(f"/sys/class/net/{netdev}/mtu")) if netdev else None,
        "downs": _int(machine.text(f"{base}/counters/link_downed")),
        "firmware": machine.text(f"{_BASE}/{device}/fw_ver") or "",
    }


def _after_colon(text: str | None) -> str:
    return (text or "").rpartition(":")[2].strip()


def _rate(text: str | None) -> float:
    match = re.match(r"[\d.]+", text or "")
    return float(match[0]) if match else 0.0


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    found = facts["rdma"]
    ports = found["ports"]
    if not ports:
        detail = "no InfiniBand or RoCE device" + (": NCCL uses TCP between hosts" if situation.is_cluster else "")
        yield ok("rdma.ports", detail)
        return
    yield _states(ports)
    yield _rates(ports)
    yield from _roce(ports)
    if not any(name.startswith("uverbs") for name in found["nodes"]):
        fix = "in a container: --device /dev/infiniband, or the rdma/... resource of the device plugin"
        yield wrong("rdma.devices", "no /dev/infiniband/uverbs*, although the kernel has RDMA devices", fix)
    else:
        yield ok("rdma.devices", "/dev/infiniband is there")
    yield _locked_memory(facts["limits"])
    if facts["gpu"]["devices"]:
        yield _gpudirect(found)


def _states(ports: list[dict[str, Any]]) -> Diagnosis:
    name = "rdma.ports"
    down = [port for port in ports if port["state"] != "ACTIVE"]
    if not down:
        layers = sorted({port["layer"] for port in ports})
        return ok(name, f"{len(ports)} ports active, {' and '.join(layers)}")
    detail = shortened(f"{port['name']} is {port['state'] or '?'} ({port['physical'] or '?'})" for port in down)
    if all(port["state"] == "INIT" for port in down):
        return wrong(name, detail, "the link is up and has no subnet manager: start opensm, or check the switch")
    fix = "cable, transceiver, switch port; leave a port out with NCCL_IB_HCA"
    return wrong(name, detail, fix) if len(down) == len(ports) or _is_trained(down) else warning(name, detail, fix)


def _is_trained(down: list[dict[str, Any]]) -> bool:
    """Whether any of them is not a port without a cable (Disabled or Polling), which may be on purpose."""
    return any(port["physical"] not in ("Disabled", "Polling", "Sleep") for port in down)


def _rates(ports: list[dict[str, Any]]) -> Diagnosis:
    """Ports of one link layer that are active should be equally fast: a ring is as slow as its slowest link."""
    slow = []
    for layer in {port["layer"] for port in ports}:
        active = [port for port in ports if port["layer"] == layer and port["state"] == "ACTIVE"]
        best = max((port["rate_gbit"] for port in active), default=0.0)
        slow += [
            f"{port['name']}: {port['rate_gbit']:g} of {best:g} Gb/s" for port in active if port["rate_gbit"] < best
        ]
    if slow:
        fix = "a link trained down (cable, transceiver), or a port of another network: leave it out with NCCL_IB_HCA"
        return warning("rdma.rate", shortened(sorted(slow)), fix)
    return ok("rdma.rate", ", ".join(sorted({f"{port['rate_gbit']:g} Gb/s" for port in ports})))


def _roce(ports: list[dict[str, Any]]) -> Iterator[Diagnosis]:
    roce = [port for port in ports if port["layer"] == "Ethernet" and port["state"] == "ACTIVE"]
    if not roce:
        return
    without = [port["name"] for port in roce if not any("v2" in gid for gid in port["gids"])]
    if without:
        fix = "give the interface an IP address; NCCL_IB_GID_INDEX selects a RoCE v2 GID"
        yield wrong("rdma.gid", f"no RoCE v2 GID: {shortened(without)}", fix)
    else:
        yield ok("rdma.gid", "every RoCE port has a v2 GID")
    small = [f"{port['interface']}: {port['mtu']}" for port in roce if port["mtu"] and port["mtu"] < _ROCE_MTU]
    if small:
        fix = "ip link set dev ... mtu 9000, on the switch too: packets of 4,096 bytes need 4,200"
        yield warning("rdma.mtu", f"small MTU under RoCE: {shortened(small)}", fix)


def _locked_memory(limits: dict[str, Any]) -> Diagnosis:
    soft = limits.get("memlock")
    if soft is None:
        return unknown("rdma.memlock", "the limit of locked memory is not known")
    if soft >= 0 and soft < 1 << 36:
        fix = "ulimit -l unlimited (limits.conf, LimitMEMLOCK of the service); Kubernetes: capabilities.add: [IPC_LOCK]"
        return wrong("rdma.memlock", f"locked memory is limited to {soft >> 10} KiB", fix)
    return ok("rdma.memlock", "locked memory is not limited")


def _gpudirect(found: dict[str, Any]) -> Diagnosis:
    name = "rdma.gpudirect"
    match = re.match(r"(\d+)\.(\d+)", found["kernel"])
    has_dmabuf = found["open_driver"] and match is not None and (int(match[1]), int(match[2])) >= (5, 12)
    if found["peer_module"]:
        return ok(name, f"{found['peer_module']} is loaded")
    if has_dmabuf:
        return ok(name, "DMA-BUF of the open kernel module")
    fix = "modprobe nvidia-peermem, or the driver's open kernel modules on Linux 5.12 and newer"
    return warning(name, "no GPUDirect RDMA: traffic between hosts is copied through host memory", fix)
