"""What an H200 allocated at its peak for compiled blocks with a fused loss: groups of benchmarks/gpu_cases.py, bytes
(benchmarks/results/gpu_step-2026-11-16-h200.md)."""

from __future__ import annotations

from benchmark_folder import benchmarks_importable

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec

with benchmarks_importable():
    import gpu_cases

MEASURED = {
    "1b-single": 36_282_902_528,
    "1b-fake8": 21_599_491_584,
    "8b-fake8-bf16": 83_297_964_544,
    "8b-fake8-float8": 83_300_241_920,
    "family-gemma2": 36_130_374_144,
    "family-mixtral": 34_577_698_304,
    "family-phi3": 33_479_949_824,
}


def case_of(name: str) -> tuple[RunSpec, Plan]:
    (group,) = (group for group in gpu_cases.GROUPS if group.name == name)
    case = group.case("weft")
    tables = gpu_cases.run_tables(group, case, tiny=False)
    return RunSpec.from_tables(tables), Plan.from_tables(gpu_cases.plan_tables(case, tiny=False))
