"""The devices of this host: their kind and their name in the catalogue. Without a GPU driver it imports no torch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Literal

from weft import hardware
from weft.core.errors import DeviceError, PlanError

DeviceChoice = Literal["auto", "cpu", "cuda"]
DeviceType = Literal["cpu", "cuda"]

_PRINT_NAME = "import torch; print(torch.cuda.get_device_name())"


def choose_device_type(choice: DeviceChoice, *, local_ranks: int) -> DeviceType:
    """cuda if every local rank gets its own GPU; an explicit choice that is impossible is an error, not a fallback."""
    available = 0 if choice == "cpu" else num_gpus()
    if choice == "cuda" and available < local_ranks:
        raise DeviceError(
            f"{local_ranks} local ranks need {local_ranks} GPUs, but there are {available}", hint="use --device cpu"
        )
    if choice == "auto" and 0 < available < local_ranks:
        raise DeviceError(
            f"{local_ranks} ranks were requested but this host has {available} GPU{'s' if available > 1 else ''}",
            hint=f"use --nproc {available}, or --device cpu to train on CPU processes",
        )
    return "cuda" if choice != "cpu" and available >= local_ranks else "cpu"


def num_gpus() -> int:
    """GPUs that torch can use."""
    if "torch" not in sys.modules and not _has_driver():
        return 0
    import torch  # a second or two, which a launcher without a driver does not spend

    return torch.cuda.device_count()


def local_devices(num_ranks: int, *, device_type: DeviceType) -> str:
    """So many of this host's devices, in the notation of `hardware`."""
    name = _gpu_name() if device_type == "cuda" else None
    device = "CPU" if name is None else hardware.find_device(name)
    if device is None:
        raise PlanError(
            f"cannot choose the recompute mixture of a budget: the catalogue has no entry for {name}",
            hint="set it: activations.mixture = [full, selective]",
        )
    return f"{num_ranks}x{device}"


def _has_driver() -> bool:
    if Path("/dev/kfd").exists():  # ROCm
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _gpu_name() -> str:
    """The device name, read in a child process: a launcher with a CUDA context would hold GPU memory all along."""
    child = subprocess.run([sys.executable, "-c", _PRINT_NAME], capture_output=True, text=True, check=False)
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise PlanError(
            f"cannot choose the recompute mixture of a budget: torch.cuda.get_device_name() failed: {reason}",
            hint="set it: activations.mixture = [full, selective]; or use --device cpu",
        )
    return child.stdout.strip()
