"""Which plans this version of weft can also train: the planner knows more layouts than the engine carries out yet.

What the engine refuses is declared in core.plan; nothing here looks at the engine.
"""

from __future__ import annotations

from weft.core.errors import NotBuiltError
from weft.core.executable import require_executable
from weft.plan.estimate import Estimate
from weft.plan.search import Answer, search
from weft.plan.space import Freedom

# The keys that narrow a search to what is built; schedules that it tries by itself all are.
BUILT = {
    "tensor_parallel.mode": "1d",
    "mesh.cp": 1,
    "mesh.ep": 1,
    "offload.optimizer": "none",
}


def why_not_trained(found: Estimate) -> str:
    """What of this plan is not built, or nothing."""
    try:
        require_executable(found.plan)
    except NotBuiltError as error:
        return error.message
    return ""


def best_trained(answer: Answer) -> Estimate | None:
    """The best plan that `weft train` takes, if there is one."""
    precision = answer.plans[0].plan.precision.model_dump(exclude_none=True)
    found = search(answer.request, freedom=Freedom(fixed=dict(BUILT)), precision=precision, top=1)
    return found.plans[0] if found.plans else None
