"""All probes on one host: `record_of` reads and judges; a record is plain JSON, so that other hosts can send theirs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from weft.doctor.check import Diagnosis, unknown
from weft.doctor.machine import Machine
from weft.doctor.probes import amd, clock, disk, gpu, gpu_links, limits, network, rdma, software, variables
from weft.doctor.situation import Situation

PROBES: dict[str, ModuleType] = {
    "software": software,
    "gpu": gpu,
    "gpu_links": gpu_links,
    "amd": amd,
    "rdma": rdma,
    "network": network,
    "limits": limits,
    "variables": variables,
    "clock": clock,
    "disk": disk,
}


def record_of(machine: Machine) -> dict[str, Any]:
    """The facts of a host by probe; `failed`: probes that could not read theirs."""
    record: dict[str, Any] = {"failed": {}}
    for name, probe in PROBES.items():
        try:
            record[name] = probe.read(machine)
        except Exception as error:  # a doctor reports what the other probes found
            record["failed"][name] = f"{type(error).__name__}: {error}"
    record["host"] = record.get("network", {}).get("name") or "this host"
    return record


def checks_of(record: dict[str, Any], situation: Situation) -> list[Diagnosis]:
    """The verdicts on one host's facts."""
    checks = [unknown(f"probe.{name}", f"the probe failed: {why}") for name, why in record["failed"].items()]
    for name, probe in PROBES.items():
        if name in record["failed"]:
            continue
        try:
            checks += probe.judge(record, situation)
        except KeyError as missing:  # facts of a probe that failed, which is reported
            if missing.args[0] not in record["failed"]:
                raise
    return checks


def is_of_cluster(record: dict[str, Any]) -> bool:
    """Whether the host looks like one of several: it has an active RDMA port."""
    return any(port["state"] == "ACTIVE" for port in record.get("rdma", {}).get("ports", []))
