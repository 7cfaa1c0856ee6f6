"""Resolve a plan's open choices by the kind of device: a GPU computes in bf16, compiles blocks and fuses head and loss
wherever weft supports it. Every verb calls this, so all resolve the same plan."""

from __future__ import annotations

from typing import Any

from weft.core.executable import why_not_compiled, why_not_fused
from weft.core.plan import Compile, Plan


def plan_on(tables: dict[str, Any], *, on_gpu: bool, source: str = "plan") -> Plan:
    """The plan of `tables` with its open choices resolved. Given keys stay; a CPU uses the plan's own defaults.

    `compile.enabled = false` turns the fast path off: the loss is then not fused unless `kernels.loss` is given.
    """
    if not on_gpu:
        return Plan.from_tables(tables, source=source)
    plan = Plan.from_tables(_in_bf16(tables), source=source)
    compiled, kernels = tables.get("compile", {}), tables.get("kernels", {})
    if "enabled" not in compiled:
        plan = plan.model_copy(update={"compile": Compile(enabled=not why_not_compiled(plan))})
    if "loss" not in kernels and compiled.get("enabled", True) and not why_not_fused(plan):
        plan = plan.model_copy(update={"kernels": plan.kernels.model_copy(update={"loss": "fused"})})
    return plan


def _in_bf16(tables: dict[str, Any]) -> dict[str, Any]:
    precision, dp = tables.get("precision", {}), tables.get("data_parallel", {})
    if not (isinstance(precision, dict) and isinstance(dp, dict)):
        return tables  # the parser refuses it by name
    if "preset" in precision or dp.get("strategy") == "dataparallel":
        return tables
    return {**tables, "precision": {**precision, "preset": "bf16"}}
