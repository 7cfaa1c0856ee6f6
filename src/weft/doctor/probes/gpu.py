"""Health of NVIDIA GPUs, from the XML of `nvidia-smi -q -x`: visible, ECC, throttling, PCIe, memory in use, modes.

The XML has all fields of all GPUs in one answer, and unknown ones are absent; `--query-gpu` refuses a whole query for
one field that a driver does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from weft.doctor.check import Diagnosis, ok, shortened, unknown, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_NVIDIA = "0x10de"
_HOT_MARGIN_C = 5
_IN_USE_BYTES = 1 << 30
_THROTTLES = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware slowdown by temperature",
    "hw_power_brake_slowdown": "power brake of the chassis",
    "sw_thermal_slowdown": "slowdown by temperature",
}


def read(machine: Machine) -> dict[str, Any]:
    facts: dict[str, Any] = {"on_bus": _on_bus(machine), "devices": [], "error": ""}
    facts["has_driver"] = machine.has("/proc/driver/nvidia/version")
    facts["nodes"] = [name for name in machine.names("/dev") if re.fullmatch(r"nvidia(\d+|-uvm|ctl)", name)]
    if not facts["has_driver"] and not facts["on_bus"] and not facts["nodes"]:
        return facts
    output = machine.run(["nvidia-smi", "-q", "-x"])
    if output is None:
        facts["error"] = "nvidia-smi is not installed"
    elif output.timed_out:
        facts["error"] = "nvidia-smi did not answer"
    elif output.code != 0 or "<nvidia_smi_log" not in output.text:
        lines = [line for line in output.text.splitlines() if line.strip()]
        facts["error"] = f"nvidia-smi failed: {lines[0].strip() if lines else f'exit code {output.code}'}"
    else:
        facts.update(parse(output.text))
    return facts


def parse(text: str) -> dict[str, Any]:
    """The facts of an `nvidia-smi -q -x` document."""
    try:
        log = ElementTree.fromstring(text[text.index("<nvidia_smi_log") :])
    except ElementTree.ParseError as error:
        return {"error": f"the output of nvidia-smi is not readable: {error}"}
    return {
        "driver": log.findtext("driver_version", "").strip(),
        "cuda": log.findtext("cuda_version", "").strip(),
        "devices": [_device(gpu, index) for index, gpu in enumerate(log.findall("gpu"))],
    }


def _device(gpu: ElementTree.Element, index: int) -> dict[str, Any]:
    def text(path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    reasons = next((part for part in gpu if part.tag in ("clocks_event_reasons", "clocks_throttle_reasons")), None)
    active = [] if reasons is None else [part.tag for part in reasons if (part.text or "").strip() == "Active"]
    errors = gpu.find("ecc_errors/volatile")
    uncorrected = [] if errors is None else [part for part in errors if "uncorrectable" in part.tag]
    uncorrected += [] if errors is None else errors.findall("double_bit/total")  # drivers before Ampere's format
    link = "pci/pci_gpu_link_info"
    return {
        "index": index,
        "bus": gpu.get("id", ""),
        "name": text("product_name"),
        "persistence": text("persistence_mode"),
        "mig": text("mig_mode/current_mig"),
        "compute_mode": text("compute_mode"),
        "pstate": text("performance_state"),
        "active_reasons": [re.sub(r"^clocks_(event|throttle)_reasons?_", "", tag) for tag in active],
        "ecc": text("ecc_mode/current_ecc"),
        "uncorrected_errors": sum(_number(part.text) or 0 for part in uncorrected),
        "remap_pending": text("remapped_rows/remapped_row_pending"),
        "remap_failure": text("remapped_rows/remapped_row_failure"),
        "recovery": text("gpu_recovery_action"),
        "fabric": text("fabric/state"),
        "temperature_c": _number(text("temperature/gpu_temp")),
        "margin_c": _margin(
            text("temperature/gpu_temp_tlimit"),
            text("temperature/gpu_temp_slow_threshold"),
            text("temperature/gpu_temp"),
        ),
        "pcie_gen": _number(text(f"{link}/pcie_gen/current_link_gen")),
        "pcie_max_gen": _number(text(f"{link}/pcie_gen/max_link_gen")),
        "pcie_width": _number(text(f"{link}/link_widths/current_link_width")),
        "pcie_max_width": _number(text(f"{link}/link_widths/max_link_width")),
        "max_clock_mhz": _number(text("max_clocks/sm_clock")),
        "set_clock_mhz": _number(text("applications_clocks/graphics_clock")),
        "power_limit_w": _number(text("gpu_power_readings/current_power_limit")),
        "memory_bytes": (_number(text("fb_memory_usage/total")) or 0) << 20,
        "used_bytes": (_number(text("fb_memory_usage/used")) or 0) << 20,
        "processes": [_number(part.findtext("pid")) or 0 for part in gpu.findall("processes/process_info")],
    }


def _margin(limit: str, slow_at: str, now: str) -> int | None:
    """Degrees to the slowdown: reported as such since Hopper, as the temperature of the slowdown before."""
    left, highest, current = _number(limit), _number(slow_at), _number(now)
    if left is not None or highest is None or current is None:
        return left
    return highest - current


def _number(text: str | None) -> int | None:
    match = re.match(r"-?\d+", (text or "").strip())
    return int(match[0]) if match else None


def _on_bus(machine: Machine) -> int:
    """NVIDIA display controllers on the PCI bus (class 0x03...), whether or not a driver has them."""
    base = "/sys/bus/pci/devices"
    return sum(
        machine.text(f"{base}/{name}/vendor") == _NVIDIA
        and (machine.text(f"{base}/{name}/class") or "").startswith("0x03")
        for name in machine.names(base)
    )


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    gpu = facts["gpu"]
    yield _visible(gpu, situation)
    devices = gpu["devices"]
    if not devices:
        return
    yield from _memory_errors(devices)
    yield _throttling(devices)
    yield _temperature(devices)
    yield _pcie(devices)
    yield _clocks(devices)
    yield _in_use(devices)
    yield from _modes(devices, situation)


def _visible(gpu: dict[str, Any], situation: Situation) -> Diagnosis:
    name, count, on_bus = "gpu.visible", len(gpu["devices"]), gpu["on_bus"]
    if "version mismatch" in gpu["error"]:
        return wrong(name, gpu["error"], "the driver was updated while loaded: reboot, or reload the nvidia modules")
    if gpu["error"]:
        if not gpu["has_driver"]:
            fix = "install the NVIDIA driver; without it ranks run on the CPU"
            return warning(name, f"{on_bus} NVIDIA devices on the PCI bus, but no driver is loaded", fix)
        return wrong(name, gpu["error"], "look for Xid in dmesg; reset the GPU (nvidia-smi -r) or reboot the host")
    if count and not any(re.fullmatch(r"nvidia\d+", node) for node in gpu["nodes"]):
        return wrong(
            name, "no /dev/nvidia0: the container has no GPU device", "docker run --gpus all, or the device plugin"
        )
    if count and "nvidia-uvm" not in gpu["nodes"]:
        return wrong(name, "no /dev/nvidia-uvm: CUDA cannot start", "nvidia-modprobe -u -c 0 on the host, then again")
    if count and on_bus > count:
        fix = "look for Xid 79 in dmesg; reset the GPU or reboot; in a container, it may have been given fewer"
        return wrong(name, f"{on_bus} GPUs on the PCI bus, {count} answer", fix)
    if situation.num_ranks is not None and count and situation.num_ranks > count:
        return wrong(name, f"{situation.num_ranks} ranks, {count} GPUs", f"--nproc {count}, or a host with more GPUs")
    if not count:
        return ok(name, "no NVIDIA GPU")
    kinds = sorted({device["name"] for device in gpu["devices"]})
    if len(kinds) > 1:
        fix = "CUDA_VISIBLE_DEVICES selects GPUs of one kind: the slowest sets the speed of all"
        return warning(name, f"different GPUs: {shortened(kinds)}", fix)
    return ok(name, f"{count} x {kinds[0]}")


def _memory_errors(devices: list[dict[str, Any]]) -> Iterator[Diagnosis]:
    name, bad = "gpu.ecc", [device for device in devices if device["uncorrected_errors"]]
    failed = [device for device in devices if device["remap_failure"] == "Yes"]
    pending = [device for device in devices if device["remap_pending"] == "Yes"]
    off = [device for device in devices if device["ecc"] == "Disabled"]
    if failed:
        yield wrong(name, f"{_list(failed)}: no spare memory rows are left", "replace the GPU")
    elif bad:
        detail = shortened(f"GPU {device['index']}: {device['uncorrected_errors']}" for device in bad)
        yield wrong(
            name,
            f"uncorrected memory errors: {detail}",
            "drain the host, reset the GPU (nvidia-smi -r), run diagnostics",
        )
    elif pending:
        yield warning(
            name,
            f"{_list(pending)}: memory rows wait to be remapped",
            "reset the GPU (nvidia-smi -r) before a long run",
        )
    elif off:
        fix = "nvidia-smi -e 1 and a reset: without ECC a flipped bit goes into the weights unseen"
        yield warning(name, f"{_list(off)}: ECC is off", fix)
    else:
        yield ok(name, "no uncorrected memory error")
    asked = [device for device in devices if device["recovery"] not in ("", "None", "N/A")]
    if asked:
        detail = shortened(f"GPU {device['index']}: {device['recovery']}" for device in asked)
        yield wrong(
            "gpu.recovery", f"the driver asks for an action: {detail}", "do what it asks for before the next job"
        )


def _throttling(devices: list[dict[str, Any]]) -> Diagnosis:
    found = [
        f"GPU {device['index']}: {_THROTTLES[reason]}"
        for device in devices
        for reason in device["active_reasons"]
        if reason in _THROTTLES
    ]
    if found:
        return wrong(
            "gpu.throttling", shortened(found), "cooling and power of the chassis; nvidia-smi -q -d PERFORMANCE"
        )
    return ok("gpu.throttling", "no slowdown by hardware or temperature")


def _temperature(devices: list[dict[str, Any]]) -> Diagnosis:
    known = [device for device in devices if device["temperature_c"] is not None]
    if not known:
        return unknown("gpu.temperature", "not reported")
    hot = [
        f"GPU {device['index']}: {device['temperature_c']} C"
        for device in known
        if device["margin_c"] is not None and device["margin_c"] < _HOT_MARGIN_C
    ]
    if hot:
        return warning(
            "gpu.temperature", f"close to the slowdown: {shortened(hot)}", "check fans, filters and inlet air"
        )
    return ok("gpu.temperature", f"at most {max(device['temperature_c'] for device in known)} C")


def _pcie(devices: list[dict[str, Any]]) -> Diagnosis:
    """An idle GPU lowers its generation but not its width, so the current generation counts in P0 only."""
    found = []
    best = max((device["pcie_max_gen"] or 0 for device in devices), default=0)
    for device in devices:
        width, most = device["pcie_width"], device["pcie_max_width"]
        if width and most and width < most:
            found.append(f"GPU {device['index']}: {width} of {most} lanes")
        gen = device["pcie_max_gen"] or best
        if device["pstate"] == "P0" and device["pcie_gen"] and "gpu_idle" not in device["active_reasons"]:
            gen = min(gen, device["pcie_gen"])
        if gen < best:
            found.append(f"GPU {device['index']}: generation {gen} of {best}")
    if found:
        return warning(
            "gpu.pcie",
            shortened(found),
            "reseat the card or riser, check the slot in the BIOS: copies and offload are slower",
        )
    widths = {device["pcie_width"] for device in devices if device["pcie_width"]}
    return ok("gpu.pcie", f"generation {best}, {max(widths, default=0)} lanes" if best else "not reported")


def _clocks(devices: list[dict[str, Any]]) -> Diagnosis:
    for key, what, fix in (
        ("set_clock_mhz", "application clocks", "nvidia-smi -rac resets them"),
        ("power_limit_w", "power limits", "nvidia-smi -pl sets one limit for all"),
    ):
        values: dict[str, set[Any]] = {device["name"]: set() for device in devices}
        for device in devices:
            values[device["name"]].add(device[key])
        if any(len(found) > 1 for found in values.values()):
            detail = shortened(f"GPU {device['index']}: {device[key]}" for device in devices)
            return warning("gpu.clocks", f"different {what}: {detail}", f"{fix}; the slowest GPU sets the speed of all")
    return ok("gpu.clocks", "equal clocks and power limits")


def _in_use(devices: list[dict[str, Any]]) -> Diagnosis:
    busy = [device for device in devices if device["used_bytes"] > _IN_USE_BYTES]
    if not busy:
        return ok("gpu.memory", "no memory in use by other processes")
    detail = shortened(
        f"GPU {device['index']}: {device['used_bytes'] / 2**30:.1f} GiB" + _of_processes(device["processes"])
        for device in busy
    )
    return warning("gpu.memory", f"memory in use: {detail}", "end those processes, or ranks run out of memory earlier")


def _of_processes(pids: list[int]) -> str:
    return f" by pid {', '.join(map(str, pids))}" if pids else " by processes that are not visible here"


def _modes(devices: list[dict[str, Any]], situation: Situation) -> Iterator[Diagnosis]:
    sliced = [device for device in devices if device["mig"] == "Enabled"]
    if sliced:
        fix = "nvidia-smi -mig 0: NCCL does not connect slices of one GPU"
        yield warning("gpu.mig", f"{_list(sliced)}: MIG is on, a rank gets a slice", fix)
    else:
        yield ok("gpu.mig", "off")
    shut = [device for device in devices if device["compute_mode"] == "Prohibited"]
    if shut:
        yield wrong("gpu.mode", f"{_list(shut)}: compute mode Prohibited", "nvidia-smi -c DEFAULT")
    asleep = [device for device in devices if device["persistence"] == "Disabled"]
    if asleep and (situation.is_cluster or len(devices) > 1):
        fix = "nvidia-smi -pm 1, or nvidia-persistenced: else each job waits seconds for the driver"
        yield warning("gpu.persistence", f"{_list(asleep)}: persistence mode is off", fix)
    else:
        yield ok("gpu.persistence", "on" if not asleep else "off, which is usual on a workstation")
    unjoined = [device for device in devices if device["fabric"] not in ("", "N/A", "Completed")]
    if unjoined:
        fix = "systemctl start nvidia-fabricmanager, of the driver's version: CUDA fails with error 802 without it"
        yield wrong("gpu.fabric", f"{_list(unjoined)}: NVSwitch fabric {unjoined[0]['fabric']}", fix)


def _list(devices: list[dict[str, Any]]) -> str:
    return "GPU " + ", ".join(str(device["index"]) for device in devices)
