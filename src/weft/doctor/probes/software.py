"""Versions: Python, torch, CUDA, NCCL, transformers, weft, and a digest of all installed packages.

Nothing is imported: names of `*.dist-info` folders and torch/version.py have it all, so 10,000 files are not loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from weft.doctor.check import Diagnosis, ok, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

# Major version of CUDA -> first driver of Linux that runs it, by minor-version compatibility.
FIRST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_OLDEST = {"torch": (2, 11), "transformers": (5, 17)}


def read(machine: Machine) -> dict[str, Any]:
    packages: dict[str, str] = {}
    for site in reversed(machine.sites):  # earlier folders of the path win
        packages.update(_packages(site))
    torch = _torch_version(machine.sites)
    nccl = next((packages[name] for name in sorted(packages, reverse=True) if name.startswith("nvidia-nccl-cu")), "")
    return {
        "python": machine.python,
        "packages": packages,
        "digest": digest(f"{name}=={packages[name]}" for name in sorted(packages)),
        "torch": torch.get("__version__") or packages.get("torch", ""),
        "cuda": torch.get("cuda", ""),
        "hip": torch.get("hip", ""),
        "nccl": nccl,
        "transformers": packages.get("transformers", ""),
        "weft": _own_version(),
        "weft_code": code_digest(Path(__file__).parents[2]),
        "kernel": machine.text("/proc/sys/kernel/osrelease") or "",
    }


def _packages(site: Path) -> dict[str, str]:
    found = {}
    try:
        names = os.listdir(site)
    except OSError:
        return {}
    for name in names:
        match = re.fullmatch(r"(.+)-([^-]+)\.dist-info", name)
        if match:
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def _torch_version(sites: tuple[Path, ...]) -> dict[str, str]:
    """The names that torch/version.py assigns: __version__, cuda, hip."""
    for site in sites:
        try:
            text = (site / "torch" / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        return dict(re.findall(r"^(\w+)\s*(?::[^=]+)?=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    return {}


def digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@cache
def code_digest(folder: Path) -> str:
    """A digest of weft's own files, which may differ between hosts at the same version."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def _own_version() -> str:
    import weft

    return weft.__version__


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    software, gpu = facts["software"], facts["gpu"]
    python = software["python"]
    if _version(python) < (3, 11):
        yield wrong("python", f"Python {python}", "weft needs Python 3.11 or newer")
    else:
        yield ok("python", f"Python {python}, {len(software['packages'])} packages, digest {software['digest']}")
    yield _packages_check(software)
    yield from _torch_on_gpu(software, gpu)
    yield ok("weft", f"weft {software['weft']}, code {software['weft_code']}")


def _packages_check(software: dict[str, Any]) -> Diagnosis:
    missing = [name for name in _OLDEST if not software[name]]
    if missing:
        fix = "pip install weft-train into that Python"
        return wrong("packages", f"not installed: {', '.join(missing)}", fix)
    old = [
        f"{name} {software[name]} (needs {oldest[0]}.{oldest[1]})"
        for name, oldest in _OLDEST.items()
        if _version(software[name]) < oldest
    ]
    if old:
        return wrong("packages", f"too old: {', '.join(old)}", "pip install -U, by constraints.txt")
    return ok("packages", f"torch {software['torch']}, transformers {software['transformers']}")


def _torch_on_gpu(software: dict[str, Any], gpu: dict[str, Any]) -> Iterator[Diagnosis]:
    """Whether torch is built for a CUDA that the driver runs."""
    if not gpu["devices"] or not software["torch"]:
        return
    driver, cuda = gpu.get("driver", ""), software["cuda"]
    if not cuda:
        fix = "install torch for CUDA (without constraints.txt's line of torch)"
        yield wrong("driver", f"torch {software['torch']} is built without CUDA, and there are GPUs", fix)
        return
    needed = FIRST_DRIVERS.get(_version(cuda)[0])
    if needed and _version(driver) < needed:
        fix = f"update the driver to {needed[0]} or newer, or install torch for CUDA {gpu.get('cuda', '')}"
        yield wrong("driver", f"driver {driver} does not run CUDA {cuda} of torch", fix)
    else:
        yield ok("driver", f"driver {driver}, CUDA {cuda}")
    nccl = software["nccl"]
    yield ok("nccl", f"NCCL {nccl}" if nccl else "NCCL is inside torch")


def _version(text: str) -> tuple[int, ...]:
    """'2.11.0+cu130' -> (2, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:2]) or (0,)
