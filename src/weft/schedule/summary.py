"""`summary`: a schedule's figures in one cached call, by generating and simulating it. Right for any costs and sends.

`formulas` has the same figures without simulation, for equal stages; this is for zbv and dualpipev with unequal
costs, and for links that are not free. share = 1 - work of a step / time that one more step takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from weft.schedule.in_flight import InFlight, count_in_flight
from weft.schedule.registry import default_steps, generate
from weft.schedule.simulate import StageCosts, simulate
from weft.schedule.timeline import Timeline
from weft.schedule.versions import staleness, weight_versions


@dataclass(frozen=True, kw_only=True)
class ScheduleSummary:
    """Of a step in the long run: schedules that never drain fill and drain once a training, which is left out."""

    step_s: float
    bubble_share: float
    idle_over_ideal: float
    span_bubble_share: float  # without what lies before a rank's first and after its last action
    in_flight: InFlight
    weight_versions: tuple[int, ...]  # by stage
    staleness: tuple[int, ...]  # by stage, in updates


@lru_cache(maxsize=16384)
def summary(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    *,
    forward_s: float = 1,
    backward_input_s: float = 1,
    backward_weight_s: float = 1,
    send_s: float = 0,
) -> ScheduleSummary:
    """The figures where every stage takes these times for a micro-batch; scale them, so that the cache is hit."""
    costs = StageCosts.uniform(
        num_ranks * virtual_stages,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        send_s=send_s,
    )
    steps = default_steps(name, num_ranks=num_ranks, num_microbatches=num_microbatches)

    def timeline(num_steps: int) -> Timeline:
        schedule = generate(
            name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
            num_steps=num_steps,
        )
        return simulate(schedule, costs)

    last = timeline(steps)
    step_s, work_s = last.makespan_s, sum(last.busy_s)
    if steps > 1:
        before = timeline(steps - 1)
        step_s, work_s = step_s - before.makespan_s, work_s - sum(before.busy_s)
    available_s = step_s * num_ranks
    return ScheduleSummary(
        step_s=step_s,
        bubble_share=(available_s - work_s) / available_s,
        idle_over_ideal=(available_s - work_s) / work_s,
        span_bubble_share=last.span_bubble_share,
        in_flight=count_in_flight(last.schedule),
        weight_versions=weight_versions(last.schedule),
        staleness=staleness(last.schedule),
    )
