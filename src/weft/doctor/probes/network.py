"""Names, interfaces and routes: what Gloo and NCCL listen on and connect to.

own name -> address (getent); default route -> interface (/proc/net/route); MTU and speed (/sys/class/net)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from weft.core.network import is_loopback
from weft.doctor.check import Diagnosis, ok, shortened, unknown, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_VIRTUAL = re.compile(r"^(lo|docker|br-|virbr|veth|cni|flannel|cali|tun|tap|podman)")


def read(machine: Machine) -> dict[str, Any]:
    name = machine.text("/proc/sys/kernel/hostname") or ""
    answer = machine.run(["getent", "ahosts", name]) if name else None
    return {
        "name": name,
        "can_resolve": answer is not None,
        "addresses": list(dict.fromkeys(line.split()[0] for line in answer.text.splitlines() if line.strip()))
        if answer
        else [],
        "interfaces": {name: _interface(machine, name) for name in machine.names("/sys/class/net")},
        "own_addresses": _own_addresses(machine.output("ip -j addr")),
        "route": _default_route(machine.text("/proc/net/route") or ""),
    }


def _interface(machine: Machine, name: str) -> dict[str, Any]:
    def number(key: str) -> int | None:
        text = machine.text(f"/sys/class/net/{name}/{key}") or ""
        return int(text) if text.isdigit() else None

    return {
        "state": machine.text(f"/sys/class/net/{name}/operstate") or "",
        "mtu": number("mtu"),
        "mbit": number("speed"),
    }


def _own_addresses(text: str | None) -> dict[str, list[str]]:
    try:
        links = json.loads(text or "[]")
    except json.JSONDecodeError:
        return {}
    return {
        link.get("ifname", ""): [part["local"] for part in link.get("addr_info", []) if "local" in part]
        for link in links
    }


def _default_route(table: str) -> str:
    """The interface of the default route, by the smallest metric."""
    rows = [line.split() for line in table.splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"]
    return min(routes)[1] if routes else ""


def is_virtual(interface: str) -> bool:
    """Whether it is loopback, a bridge or a container's, which other hosts cannot reach."""
    return _VIRTUAL.match(interface) is not None


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    network, set_variables = facts["network"], facts["variables"]["set"]
    yield _own_name(network, situation, set_variables)
    yield _route(network, situation)
    yield _named_interfaces(network, set_variables)
    yield _speed(network)


def _own_name(network: dict[str, Any], situation: Situation, variables: dict[str, str]) -> Diagnosis:
    name, host, addresses = "network.name", network["name"], network["addresses"]
    interface = network["route"] or "eth0"
    if not network["can_resolve"] or not host:
        return unknown(name, f"the name {host or 'of this host'} could not be looked up")
    if not addresses:
        fix = f"add it to DNS or /etc/hosts; meanwhile GLOO_SOCKET_IFNAME={interface}"
        state = wrong if situation.is_cluster else warning
        return state(name, f"{host} does not resolve", fix)
    if is_loopback(addresses[0]):  # programs take the first
        if not situation.is_cluster:
            return ok(name, f"{host} resolves to {addresses[0]}, which does for one machine")
        if "GLOO_SOCKET_IFNAME" in variables:
            return ok(name, f"{host} resolves to {addresses[0]}, and GLOO_SOCKET_IFNAME is set")
        detail = (
            f"{host} resolves to {addresses[0]}: ranks of weft avoid it, other programs listen where nobody connects"
        )
        return warning(name, detail, f"GLOO_SOCKET_IFNAME={interface}, or remove the line from /etc/hosts")
    own = {address for found in network["own_addresses"].values() for address in found}
    if own and not own & set(addresses):
        fix = "correct /etc/hosts or DNS: Gloo cannot listen on an address of another host"
        return wrong(name, f"{host} resolves to {addresses[0]}, which no interface of this host has", fix)
    return ok(name, f"{host} is {addresses[0]}")


def _route(network: dict[str, Any], situation: Situation) -> Diagnosis:
    name, interface = "network.route", network["route"]
    if not interface and situation.is_cluster:
        return warning(
            name, "no default route", "name the interface to other hosts: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
        )
    if not interface:
        return ok(name, "no default route: this machine is offline")
    found = network["interfaces"].get(interface, {})
    if found.get("state") == "down":
        return wrong(
            name, f"{interface} has the default route and is down", f"ip link set {interface} up; check its cable"
        )
    mtu = f", MTU {found['mtu']}" if found.get("mtu") else ""
    return ok(name, f"{interface}{mtu}")


def _named_interfaces(network: dict[str, Any], variables: dict[str, str]) -> Diagnosis:
    """Whether the interfaces that variables name are there. NCCL takes prefixes, =exact names and ^exclusions."""
    name, known = "network.interfaces", network["interfaces"]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = variables.get(variable, "")
        if not value or value.startswith("^"):
            continue
        parts = value.removeprefix("=").split(",")
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        there = [part for part in parts if part in known or (is_prefix and any(key.startswith(part) for key in known))]
        usable = [part for part in there if known.get(part, {}).get("state") != "down"]
        if not usable:
            fix = f"interfaces of this host: {', '.join(key for key in known if not is_virtual(key)) or 'none'}"
            what = "is down" if there else "is not on this host"
            return wrong(name, f"{variable}={value}, which {what}", fix)
    return ok(name, shortened(key for key in known if not is_virtual(key)) or "loopback only")


def _speed(network: dict[str, Any]) -> Diagnosis:
    name, speed = "network.speed", network["interfaces"].get(network["route"], {}).get("mbit")
    if not speed:
        return ok(name, "not reported")
    if speed < 1000:
        fix = "cable or switch port: it may have fallen back; ethtool shows what was negotiated"
        return warning(name, f"{network['route']} runs at {speed} Mb/s", fix)
    return ok(name, f"{speed} Mb/s")
