"""Parses the notation of a cluster: `H200`, `8xH100-80GB`, `4x8xH100-80GB`, `4x8xH100-80GB@ethernet-100`.

    [[NODES x] DEVICES x] DEVICE [@ FABRIC]

One count is the number of devices: as many of the device's usual nodes as hold them, or part of one node. Two counts
are nodes and devices per node. DEVICE and FABRIC are catalogue names in any case, or paths of TOML files in its format.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from weft.core.cluster import Cluster
from weft.core.errors import BadValueError
from weft.hardware import catalogue
from weft.hardware.calibration import find
from weft.hardware.catalogue import Table

PATTERN: Final = (
    r"(?:(?P<first>\d+)\s*[x×*]\s*)?(?:(?P<second>\d+)\s*[x×*]\s*)?"
    r"(?P<device>[^@\s][^@]*?)(?:\s*@\s*(?P<fabric>[^@]+))?"
)
ROLES: Final = ("inside", "between", "host")
EXAMPLES: Final = "for example 8xH100-80GB, 4x8xH100-80GB (4 nodes of 8), 4x8xH100-80GB@ethernet-100"


def cluster(text: str, *, calibration: Path | None = None) -> Cluster:
    """The cluster that `text` names, with figures of the calibration where there are any."""
    match = re.fullmatch(PATTERN, text.strip(), re.IGNORECASE)
    if match is None:
        raise BadValueError(f"{text!r} does not name devices", hint=EXAMPLES)
    device = catalogue.device_table(match["device"])
    node = catalogue.table("nodes", device["node"], beside=device.get("beside"))
    links = _links(node, fabric=match["fabric"])
    measured = find(calibration, own_names=[table["name"] for table in (device, node, *links.values())])
    device, node = measured.overlay("devices", device), measured.overlay("nodes", node)
    links = {role: measured.overlay("links", link) for role, link in links.items()}
    counts = [int(count) for count in match.group("first", "second") if count is not None]
    num_nodes, devices_per_node = _split(text, counts=counts, capacity=node["devices_per_node"], name=device["name"])
    tables = (device, node, *links.values())
    calibrated = any(table["calibrated"] for table in tables)
    return Cluster(
        name=_name(device["name"], num_nodes, devices_per_node, match["fabric"]),
        device=catalogue.build_device(device),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        **{role: catalogue.build_link(link, devices_per_node=devices_per_node) for role, link in links.items()},
        host_memory_bytes=node["host_memory_bytes"],
        nvme_bytes_per_s=node["nvme_bytes_per_s"],
        # a user's file may leave out the figures of the host's CPUs
        host_memory_bytes_per_s=node.get("host_memory_bytes_per_s", Cluster.host_memory_bytes_per_s),
        host_cores_per_device=node.get("host_cores_per_device", Cluster.host_cores_per_device),
        host_core_parameters_per_s=node.get("host_core_parameters_per_s", Cluster.host_core_parameters_per_s),
        calibrated=calibrated,
        sources=catalogue.sources_of(*tables) + ((measured.source,) if calibrated else ()),
    )


def _links(node: Table, *, fabric: str | None) -> dict[str, Table]:
    roles = {role: catalogue.table("links", node[role], beside=node.get("beside")) for role in ROLES}
    return roles if fabric is None else roles | {"between": _fabric(fabric)}


def _split(text: str, *, counts: list[int], capacity: int, name: str) -> tuple[int, int]:
    """(nodes, devices per node)."""
    if 0 in counts:
        raise BadValueError(f"{text!r} asks for no devices", hint=EXAMPLES)
    if len(counts) == 2:
        _require_room(text, devices_per_node=counts[1], capacity=capacity, name=name)
        return counts[0], counts[1]
    num_devices = counts[0] if counts else 1
    if num_devices <= capacity:
        return 1, num_devices
    if num_devices % capacity:
        raise _uneven(num_devices, capacity=capacity, name=name)
    return num_devices // capacity, capacity


def _require_room(text: str, *, devices_per_node: int, capacity: int, name: str) -> None:
    if devices_per_node > capacity:
        raise BadValueError(
            f"{text!r}: a node holds at most {capacity} {name}, not {devices_per_node}",
            hint=f"write NODESx{capacity}x{name}, or describe your node in a TOML file",
        )


def _uneven(num_devices: int, *, capacity: int, name: str) -> BadValueError:
    below = num_devices // capacity * capacity
    even = max(size for size in range(1, capacity + 1) if num_devices % size == 0)
    return BadValueError(
        f"{num_devices} {name} do not fill nodes of {capacity}",
        hint=f"the nearest counts are {below} and {below + capacity}; "
        f"for smaller nodes write {num_devices // even}x{even}x{name}",
    )


def _fabric(name: str) -> Table:
    found = (
        catalogue.table("links", name) if name.lower() in catalogue.names("links") or name.endswith(".toml") else None
    )
    if found is None or found.get("kind", "between") != "between":
        hint = catalogue.nearest(name, catalogue.fabric_names())
        raise BadValueError(f"{name!r} is not a link between nodes", hint=hint)
    return found


def _name(device: str, num_nodes: int, devices_per_node: int, fabric: str | None) -> str:
    suffix = f"@{fabric if fabric.endswith('.toml') else fabric.lower()}" if fabric else ""
    counts = f"{num_nodes}x{devices_per_node}x" if num_nodes > 1 else f"{devices_per_node}x"
    return f"{counts}{device}{suffix}"
