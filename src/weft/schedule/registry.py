"""Names to schedules: `generate` builds one, `check_request` lists why one cannot be built. Names as in `core.plan`.

Layers and costs are the planner's: it checks that a model has enough blocks for the stages.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from weft.core.errors import PlanError
from weft.schedule.generators import (
    dualpipev,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    zbv,
    zero_bubble,
)
from weft.schedule.schedule import Schedule, WeightRule, loop_placement, v_placement
from weft.schedule.size import PipelineSize, ScheduleSpec

_MODULES = (
    naive,
    gpipe,
    one_f_one_b,
    interleaved_1f1b,
    looped_bfs,
    zero_bubble,
    zbv,
    dualpipev,
    pipedream,
    pipedream_2bw,
)
SPECS: Final[Mapping[str, ScheduleSpec]] = MappingProxyType({module.SPEC.name: module.SPEC for module in _MODULES})
NAMES: Final = tuple(SPECS)
_PLACEMENTS = {"loop": loop_placement, "v": v_placement}


def spec_of(name: str) -> ScheduleSpec:
    if name not in SPECS:
        nearest = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "one of " + ", ".join(NAMES)
        raise PlanError(f"there is no pipeline schedule {name!r}", hint=hint)
    return SPECS[name]


def default_steps(name: str, *, num_ranks: int, num_microbatches: int) -> int:
    """Steps of the generated window: 1 where the pipeline drains, else enough to fill, run full and drain."""
    if spec_of(name).weight_rule is WeightRule.FLUSH:
        return 1
    return 2 + -(-2 * num_ranks // num_microbatches)


def check_request(
    name: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, num_steps: int | None = None
) -> list[str]:
    """Every reason against such a schedule; empty if `generate` builds it."""
    spec = spec_of(name)
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "virtual_stages": virtual_stages,
        "num_steps": 1 if num_steps is None else num_steps,
    }
    reasons = [f"{key} must be at least 1, found {count}" for key, count in counts.items() if count < 1]
    if reasons:
        return reasons
    reasons = _check_virtual_stages(spec, virtual_stages)
    if spec.weight_rule is WeightRule.FLUSH and counts["num_steps"] > 1:
        reasons.append(f"{name} drains after every step, so num_steps must be 1, found {num_steps}")
    return reasons or spec.check(PipelineSize(**counts))


def _check_virtual_stages(spec: ScheduleSpec, virtual_stages: int) -> list[str]:
    least, most = spec.virtual_stages
    if virtual_stages >= least and (most is None or virtual_stages <= most):
        return []
    needs = f"exactly {least}" if least == most else f"at least {least}"
    return [f"{spec.name} needs {needs} stage{'s' * (least > 1)} per rank, found {virtual_stages}"]


def generate(
    name: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, num_steps: int | None = None
) -> Schedule:
    """The schedule `name`. `num_steps`, of schedules that never drain: the steps of the window (`default_steps`)."""
    reasons = check_request(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        num_steps=num_steps,
    )
    if reasons:
        raise PlanError(reasons[0], hint="change pipeline.schedule, pipeline.microbatches or pipeline.virtual_stages")
    spec = spec_of(name)
    steps = num_steps or default_steps(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    size = PipelineSize(
        num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages, num_steps=steps
    )
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=size.num_stages,
        num_microbatches=num_microbatches,
        num_steps=steps,
        weight_rule=spec.weight_rule,
        stage_to_rank=_PLACEMENTS[spec.placement](num_ranks=num_ranks, num_stages=size.num_stages),
        ranks=tuple(tuple(spec.rank_actions(size, rank)) for rank in range(num_ranks)),
    )
