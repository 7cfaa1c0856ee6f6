"""Plans that this version of weft can train: the planner estimates more layouts than the engine runs.

`core.executable` declares the layouts that the engine refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.executable import not_executed_reasons
from weft.plan.estimate import Estimate
from weft.plan.search import Answer, search
from weft.plan.space import SEARCHED, Freedom

# Keys that restrict a search to layouts that the engine runs; it runs all schedules of a search.
BUILT = {"tensor_parallel.mode": "1d"}


def built(fixed: Mapping[str, Any]) -> Freedom:
    """A search of trainable layouts."""
    return Freedom(fixed={**BUILT, **fixed})


def why_not_trained(found: Estimate) -> str:
    """Why the engine does not run this plan, or ''."""
    return next((sentence for sentence, _ in not_executed_reasons(found.plan)), "")


def best_trained(answer: Answer) -> Estimate | None:
    """The best plan that `weft train` runs, if there is one, with the fixed keys that it can have."""
    if not answer.plans:
        return None
    plan = answer.plans[0].plan
    fixed = {key: value for key, value in answer.fixed.items() if key not in BUILT}
    if fixed.get("offload.parameters", "none") != "none":
        fixed["offload.optimizer"] = "cpu"
    float8 = {f"float8.{key}": value for key, value in plan.float8.model_dump().items()}
    freedom = built({**fixed, **{key: value for key, value in float8.items() if key in SEARCHED}})
    precision = plan.precision.model_dump(exclude_none=True)
    found = search(answer.request, freedom=freedom, precision=precision, top=1)
    return found.plans[0] if found.plans else None
