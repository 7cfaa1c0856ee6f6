"""What the objective of a run leaves to a search of plans, and against a given plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.errors import NotBuiltError
from weft.core.objective_rules import FIXED, FIXED_BY_SCORES, FIXED_BY_TEACHER
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec


def fixed_by(run: RunSpec | None) -> dict[str, Any]:
    """The keys of plans that the objective of `run` fixes."""
    if run is None:
        return {}
    if run.objective.teacher is not None:
        return dict(FIXED_BY_TEACHER)
    if run.objective.kind == "reward":
        return dict(FIXED_BY_SCORES)
    return dict(FIXED) if run.objective.is_of_pairs else {}


def with_fixed(by_objective: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both; NotBuiltError where they differ."""
    for key, value in by_objective.items():
        if given.get(key, value) != value:
            raise NotBuiltError(
                f"objective.kind of the run is not executed with {key} = {given[key]!r}", hint=f"set {key} = {value!r}"
            )
    return {**by_objective, **given}


def keys_of(plan: Plan) -> dict[str, Any]:
    """The keys of `plan` that an objective may fix."""
    tables = plan.model_dump(mode="json")
    found = {key: tables[key.partition(".")[0]][key.partition(".")[2]] for key in FIXED_BY_SCORES | FIXED_BY_TEACHER}
    return {key: value for key, value in found.items() if not key.startswith("tensor_parallel") or plan.mesh.tp > 1}
