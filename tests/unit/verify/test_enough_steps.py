"""A pipeline that never drains is judged when it is full: with too few steps it is refused, one of many is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.core.errors import PipelineError, PlanError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify import worker
from weft.verify.refusals import require_enough_steps
from weft.verify.request import VerifyRequest
from weft.verify.session import STAGES, Session
from weft.verify.verdict import Check

CPU = torch.device("cpu")


def plan_of(schedule: str, *, pp: int, microbatches: int) -> Plan:
    return Plan.from_tables({"mesh": {"pp": pp}, "pipeline": {"schedule": schedule, "microbatches": microbatches}})


# a step's backwards on the first stage end (pp - 1) / microbatches calls later; the first step and the last come on top
@pytest.mark.parametrize(("pp", "microbatches", "least"), [(4, 1, 5), (4, 2, 4), (4, 3, 3), (4, 8, 3), (2, 1, 3)])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_too_few_steps_are_refused_with_the_number_that_suffices(
    schedule: str, pp: int, microbatches: int, least: int
) -> None:
    plan = plan_of(schedule, pp=pp, microbatches=microbatches)
    for steps in range(2, least):
        with pytest.raises(PipelineError, match=f"{steps} steps do not fill {schedule}") as refused:
            require_enough_steps(plan, steps=steps)
        assert refused.value.code == "W207"
        assert f"--steps {least} " in (refused.value.hint or "")
    require_enough_steps(plan, steps=least)
    require_enough_steps(plan, steps=least + 1)


def test_what_drains_in_every_step_needs_no_more_than_two() -> None:
    require_enough_steps(plan_of("1f1b", pp=4, microbatches=1), steps=2)
    require_enough_steps(plan_of("pipedream", pp=1, microbatches=1), steps=2)


def test_a_delayed_update_needs_a_step_that_reads_one_and_a_restart() -> None:
    plan = Plan.from_tables({"offload": {"optimizer": "cpu", "delayed": True}})
    with pytest.raises(PlanError, match=r"3 steps do not show that offload\.delayed delays") as refused:
        require_enough_steps(plan, steps=3)
    assert "--steps 4 " in (refused.value.hint or "")
    require_enough_steps(plan, steps=4)


class Untrained(Session):
    """A session whose stages find nothing."""

    def __init__(self, *_: Any, steps: int, **__: Any) -> None:
        self.steps = steps

    def _with_known_router(self, plan: Plan) -> Plan:
        return plan

    def _stages(self, *_: Any) -> Sequence[Callable[[], list[Check]]]:
        return [list for _ in STAGES]


def verified(monkeypatch: pytest.MonkeyPatch, plans: list[Plan], *, steps: int) -> tuple[list[str], list[str]]:
    """The plans that have a verdict, and what was told beside the names of stages."""
    monkeypatch.setattr(worker, "Session", Untrained)
    process: Any = SimpleNamespace(is_main=False, world_size=1)
    request = VerifyRequest(run=RunSpec.from_tables({"model": {"type": "llama"}}), plans=plans, steps=steps, as_is=True)
    told: list[str] = []
    found = worker._verify_all(request, process, Path(), CPU, lambda plan, what: told.append(f"{plan}: {what}"))
    return [verdict.plan for verdict in found], [line for line in told if not line.endswith(STAGES)]


def test_one_plan_of_many_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(schedule, pp=4, microbatches=4) for schedule in ("gpipe", "pipedream_2bw", "1f1b")]
    names, told = verified(monkeypatch, plans, steps=2)
    assert ["gpipe" in names[0], "1f1b" in names[1], len(names)] == [True, True, 2]
    assert len(told) == 1
    assert "left out: 2 steps do not fill pipedream_2bw" in told[0]
    names, told = verified(monkeypatch, plans, steps=3)
    assert (len(names), told) == (3, [])


def test_the_only_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match="do not fill"):
        verified(monkeypatch, [plan_of("pipedream", pp=4, microbatches=2)], steps=3)
