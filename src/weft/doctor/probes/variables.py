"""Environment variables of NCCL, Gloo and torch that are set, and what they do (variables.toml)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from weft.doctor.check import Diagnosis, ok, shortened, warning, wrong
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_FAMILIES = re.compile(
    r"^(NCCL_|GLOO_|TORCH|TP_SOCKET|UCX_|FI_|OMP_|MKL_|CUDA_|PYTORCH_|HSA_|RCCL_|HIP_|LD_PRELOAD|PYTHONPATH|MASTER_|WEFT_)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")


def read(machine: Machine) -> dict[str, Any]:
    found = {name: value for name, value in sorted(machine.environment.items()) if _FAMILIES.match(name)}
    return {"set": {name: "(hidden)" if _SECRET.search(name) else value for name, value in found.items()}}


@cache
def table() -> dict[str, dict[str, Any]]:
    """Variable -> does: one clause; rules: for which values a warning is due, and why."""
    return tomllib.loads(Path(__file__).with_name("variables.toml").read_text(encoding="utf-8"))


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    given = facts["variables"]["set"]
    harmless = []
    for name, value in given.items():
        rule = _rule(name, value, facts, situation)
        if rule is None:
            does = table().get(name, {}).get("does")
            harmless.append(f"{name}={value}" + (f" ({does})" if does else ""))
            continue
        make = wrong if rule.get("state") == "wrong" else warning
        yield make("variables", f"{name}={value}: {rule['why']}", rule.get("fix", f"unset {name}"))
    yield ok("variables", shortened(harmless, most=12) or "none is set")


def _rule(name: str, value: str, facts: dict[str, Any], situation: Situation) -> dict[str, str] | None:
    """The first rule of the variable that its value and this host meet."""
    conditions = {
        "gpus": len(facts["gpu"]["devices"]) > 0,
        "several gpus": len(facts["gpu"]["devices"]) > 1,
        "rdma": bool(facts["rdma"]["ports"]),
        "cluster": situation.is_cluster,
        "": True,
    }
    for rule in table().get(name, {}).get("rules", []):
        if re.fullmatch(rule["value"], value.strip(), re.IGNORECASE) and conditions[rule.get("where", "")]:
            return dict(rule)
    return None
