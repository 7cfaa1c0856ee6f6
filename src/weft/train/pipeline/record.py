"""Record of a pipeline: its ranks' actions in the first steps, as one timeline beside a simulated one.

The simulated timeline has the schedule's order and the measured mean cost of each (stage, kind). The replayed one, of
which only the figures are kept, has the measured duration of every action: time beyond it is explained neither by order
nor by work. pipeline.json has both timelines, pipeline_trace.json opens in Perfetto, the ledger has the figures.
The record is of rank 0's pipeline; the others do the same on other rows. `watch` creates it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.terms import MemoryTerm
from weft.schedule import (
    Schedule,
    StageCosts,
    Timeline,
    chrome_trace,
    count_in_flight,
    gap_seconds,
    gaps,
    mean_costs,
    replay,
    simulate,
)

PIPELINE, TRACE = "pipeline.json", "pipeline_trace.json"


@dataclass(frozen=True, kw_only=True)
class WatchedStep:
    """One recorded step of all ranks of a pipeline."""

    step: int
    timeline: Timeline
    asked: tuple[tuple[float, ...], ...]
    is_disturbed: bool  # the first step of a process, or one whose memory was measured

    def figures(self) -> dict[str, Any]:
        shares = {"makespan_s": self.timeline.makespan_s, "bubble_share": self.timeline.bubble_share}
        return {"step": self.step, **shares, "is_disturbed": self.is_disturbed}


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """A recorded pipeline. `most_in_flight` is by stage; `ranks` are its global ranks in pp order."""

    steps: tuple[WatchedStep, ...]
    most_in_flight: tuple[int, ...]
    ranks: tuple[int, ...]
    is_one_clock: bool

    @property
    def chosen(self) -> WatchedStep:
        """The median of the undisturbed steps, or of all if there is none."""
        calm = [step for step in self.steps if not step.is_disturbed] or list(self.steps)
        return sorted(calm, key=lambda step: step.timeline.makespan_s)[(len(calm) - 1) // 2]

    @property
    def schedule(self) -> Schedule:
        return self.steps[0].timeline.schedule

    @property
    def costs(self) -> StageCosts:
        return mean_costs(self.chosen.timeline, self.chosen.asked)

    def figures(self, memory_ranks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The ledger's entry; `memory_ranks` are the ledger's."""
        schedule, chosen, costs = self.schedule, self.chosen, self.costs
        timelines = {
            "measured": chosen.timeline,
            "replayed": replay(chosen.timeline, costs),
            "simulated": simulate(schedule, costs),
        }
        return {
            "schedule": schedule.name,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "ranks": list(self.ranks),
            "step": chosen.step,
            "is_disturbed": chosen.is_disturbed,
            "makespan_s": {name: timeline.makespan_s for name, timeline in timelines.items()},
            "bubble_share": {name: timeline.bubble_share for name, timeline in timelines.items()},
            "in_flight": {
                "measured": list(self.most_in_flight),
                "scheduled": list(count_in_flight(schedule).by_stage_until_weight),
            },
            "activation_bytes": [_activation_bytes(memory_ranks, rank) for rank in self.ranks],
            "gaps_s": gap_seconds(chosen.timeline, chosen.asked),
            "clock": "one host" if self.is_one_clock else "hosts compared at the start",
        }

    def as_dict(self, memory_ranks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """pipeline.json: the figures and both timelines, in seconds since the first action."""
        chosen, costs = self.chosen, self.costs
        measured = {**_times(chosen.timeline), "asked": _shifted(chosen.asked, chosen.timeline.origin_s)}
        return {
            "version": 1,
            "order": self.schedule.to_text(),
            **self.figures(memory_ranks),
            "steps": [step.figures() for step in self.steps],
            "costs": {name: list(values) for name, values in vars(costs).items()},
            "measured": measured,
            "simulated": _times(simulate(self.schedule, costs)),
        }

    def trace(self) -> list[dict[str, Any]]:
        """For Perfetto: the measured pipeline with its gaps as one process, the simulated one as another."""
        chosen = self.chosen
        simulated = simulate(self.schedule, self.costs)
        return [
            *_of_process(chrome_trace(chosen.timeline), 0, f"measured, step {chosen.step}"),
            *_gap_events(chosen),
            *_of_process(chrome_trace(simulated), 1, "simulated with the measured costs"),
        ]


def write_pipeline(folder: Path, record: PipelineRecord | None, memory_ranks: Sequence[dict[str, Any]]) -> None:
    """Write both files, or remove them without a record: a run resumed without a pipeline must not show an old one."""
    if record is None:
        for name in (PIPELINE, TRACE):
            (folder / name).unlink(missing_ok=True)
        return
    for name, content in ((PIPELINE, record.as_dict(memory_ranks)), (TRACE, record.trace())):
        (folder / name).write_text(json.dumps(content) + "\n", encoding="utf-8")


def _activation_bytes(memory_ranks: Sequence[dict[str, Any]], rank: int) -> int | None:
    """Activations at the rank's peak, if that was measured."""
    for row in memory_ranks:
        if row["rank"] == rank and "step_peak_bytes" in row:
            return int(row["terms"].get(str(MemoryTerm.ACTIVATIONS), 0))
    return None


def _times(timeline: Timeline) -> dict[str, Any]:
    return {
        "starts": _shifted(timeline.starts, timeline.origin_s),
        "ends": _shifted(timeline.ends, timeline.origin_s),
        "bubble_share_by_rank": list(timeline.bubble_share_by_rank),
    }


def _shifted(rows: Sequence[Sequence[float]], origin_s: float) -> list[list[float]]:
    return [[round(value - origin_s, 7) for value in row] for row in rows]


def _of_process(events: list[dict[str, Any]], number: int, name: str) -> Iterator[dict[str, Any]]:
    for event in events:
        is_name = event["name"] == "process_name"
        yield {**event, "pid": number, **({"args": {"name": name}} if is_name else {})}


def _gap_events(step: WatchedStep) -> Iterator[dict[str, Any]]:
    for rank, kind, start_s, end_s in gaps(step.timeline, step.asked):
        times = {"ts": (start_s - step.timeline.origin_s) * 1e6, "dur": (end_s - start_s) * 1e6}
        yield {"name": str(kind), "cat": str(kind), "ph": "X", **times, "pid": 0, "tid": rank}
