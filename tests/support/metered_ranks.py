"""A few real steps of a run under a plan, with the meter that dry runs use: what a rank held, computed and sent."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining
from weft.engine.measure.meter import StepMeter
from weft.engine.pp.runtime import PipelineRuntime

Tables = dict[str, Any]


def metered_in_rank(_rank: int, _num_ranks: int, run: Tables, plan: Tables) -> Tables:
    stage = FakeTraining(RunSpec.from_tables(run), Plan.from_tables(plan))
    stage.build()
    with torch.no_grad():
        for parameter in stage.engine.model.parameters():
            parameter.fill_(0.01)  # memory that nothing was written to may hold NaN, which a pipeline refuses
    stage.step()  # DDP's buckets are known once they were sent
    meter = StepMeter(stage.engine)
    for _ in range(3):
        with meter.measuring():
            meter.next_step()
            stage.step()
    pipeline = PipelineRuntime.of(stage.engine)
    held = pipeline.schedule_runner.record.most_in_flight if pipeline is not None else {}
    found = {"is_complete": meter.is_complete, "traffic": meter.traffic, "flops": meter.flops, **meter.peak.as_dict()}
    return {**found, "held_by_stage": held}
