"""AMD GPUs: the devices that ROCm needs (/dev/kfd, /dev/dri/renderD*)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.doctor.check import Diagnosis, ok, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_AMD = "0x1002"


def read(machine: Machine) -> dict[str, Any]:
    base = "/sys/class/kfd/kfd/topology/nodes"
    counts = [machine.text(f"{base}/{node}/properties") or "" for node in machine.names(base)]
    return {
        "gpus": sum("simd_count" in text and "simd_count 0" not in text for text in counts),
        "has_kfd": machine.has("/dev/kfd"),
        "render_nodes": sum(name.startswith("renderD") for name in machine.names("/dev/dri")),
    }


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    amd = facts["amd"]
    if not amd["gpus"]:
        return
    if not amd["has_kfd"]:
        yield wrong(
            "amd.devices", f"{amd['gpus']} AMD GPUs, and no /dev/kfd", "docker run --device /dev/kfd --device /dev/dri"
        )
    elif amd["render_nodes"] < amd["gpus"]:
        detail = f"{amd['gpus']} AMD GPUs, {amd['render_nodes']} render nodes in /dev/dri"
        yield wrong("amd.devices", detail, "docker run --device /dev/dri, and the group render")
    elif not facts["software"].get("hip"):
        yield wrong("amd.torch", f"{amd['gpus']} AMD GPUs, and torch is not built for ROCm", "install torch for ROCm")
    else:
        yield ok("amd.devices", f"{amd['gpus']} GPUs, /dev/kfd and /dev/dri are there")
