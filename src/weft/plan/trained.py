"""Which plans this version of weft can also train: the planner knows more layouts than the engine carries out yet.

What the engine refuses is declared in core.executable; nothing here looks at the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.executable import not_executed_reasons
from weft.core.plan import SPLIT
from weft.plan.estimate import Estimate
from weft.plan.search import Answer, search
from weft.plan.space import SYNCHRONOUS, Freedom

# The keys that narrow a search to what is built; schedules that it tries by itself all are.
BUILT = {
    "tensor_parallel.mode": "1d",
    "mesh.cp": 1,
    "mesh.ep": 1,
    "offload.optimizer": "none",
}


def built(fixed: Mapping[str, Any]) -> Freedom:
    """A search of what is built; products in float8 go with neither tensor parallelism nor split backwards yet."""
    if fixed.get("float8.linears", "none") == "none":
        return Freedom(fixed={**BUILT, **fixed})
    whole = tuple(name for name in SYNCHRONOUS if name not in SPLIT)
    return Freedom(schedules=whole, fixed={**BUILT, "mesh.tp": 1, **fixed})


def why_not_trained(found: Estimate) -> str:
    """What of this plan is not built, or nothing."""
    return next((sentence for sentence, _ in not_executed_reasons(found.plan)), "")


def best_trained(answer: Answer) -> Estimate | None:
    """The best plan that `weft train` takes, if there is one."""
    plan = answer.plans[0].plan
    freedom = built({f"float8.{key}": value for key, value in plan.float8.model_dump().items()})
    precision = plan.precision.model_dump(exclude_none=True)
    found = search(answer.request, freedom=freedom, precision=precision, top=1)
    return found.plans[0] if found.plans else None
