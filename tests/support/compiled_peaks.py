"""What an H200 allocated at its peak for compiled blocks with a fused loss: groups of benchmarks/gpu_cases.py, bytes
(benchmarks/results/gpu_step-2026-11-16-h200.md). Gemma 2's is missing: it was measured (36.13 GB) when a head's
gradient was scaled beside itself, which made its peak; by the dry run it is 34.82 GB since."""

from __future__ import annotations

from benchmark_folder import benchmarks_importable

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec

with benchmarks_importable():
    import gpu_cases

MEASURED = {
    "1b-single": 36_282_902_528,
    "1b-fake8": 21_195_738_624,
    "8b-fake8-bf16": 81_632_709_120,
    "8b-fake8-float8": 74_437_568_000,
    "family-mixtral": 34_577_698_304,
    "family-phi3": 33_479_949_824,
}


def case_of(name: str) -> tuple[RunSpec, Plan]:
    (group,) = (group for group in gpu_cases.GROUPS if group.name == name)
    case = group.case("weft")
    tables = gpu_cases.run_tables(group, case, tiny=False)
    return RunSpec.from_tables(tables), Plan.from_tables(gpu_cases.plan_tables(case, tiny=False))
