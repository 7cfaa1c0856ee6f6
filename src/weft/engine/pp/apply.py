"""From a plan's pipeline to one rank of it: the schedule, the split of the model, the rank's stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from weft.core.errors import PipelineError
from weft.core.plan import Pipeline
from weft.engine.mesh import Topology
from weft.engine.pp.no_flush_runner import NoFlushRunner
from weft.engine.pp.p2p import StageLinks
from weft.engine.pp.runtime import PipelineRuntime
from weft.engine.pp.schedule_runner import ScheduleRunner
from weft.engine.pp.shared_weights import SharedWeights, pair_group
from weft.engine.pp.stages import Stages, drop_other_stages
from weft.engine.pp.weight_stash import WeightStash
from weft.models.layout import ModelLayout
from weft.models.pp.split import PipelineSplit, split_model
from weft.schedule import Calls, Schedule, generate

# Gloo transfers a message when its receive is posted. NCCL's receives occupy the device, and queue with sends.
RECEIVES_AHEAD = 1


@dataclass(frozen=True, kw_only=True)
class PipelineSplitPlan:
    """A model's split over a schedule, before it is applied."""

    schedule: Schedule
    calls: Calls | None  # of a schedule that never flushes
    split: PipelineSplit
    own: tuple[int, ...]


def split_pipeline(model: nn.Module, layout: ModelLayout, policy: Pipeline, topology: Topology) -> PipelineSplitPlan:
    """Find the model's split points. Probes the model's own forward, so before any wrapping."""
    num_ranks, num_microbatches, calls = topology.pp_degree, policy.microbatches, None
    schedule = generate(
        policy.schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=policy.virtual_stages,
    )
    if policy.never_drains:
        calls = Calls(
            name=policy.schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            vertical_sync=policy.vertical_sync,
        )
        schedule = calls.schedule
    split = split_model(model, layout, num_stages=schedule.num_stages, sizes=policy.blocks)
    return PipelineSplitPlan(schedule=schedule, calls=calls, split=split, own=schedule.rank_to_stages[topology.pp_rank])


def keep_own_stages(
    model: nn.Module, layout: ModelLayout, split_plan: PipelineSplitPlan, *, dtype: torch.dtype, device: torch.device
) -> ModelLayout:
    return drop_other_stages(model, layout, split_plan.split, split_plan.own, dtype=dtype, device=device)


def build_pipeline(
    model: nn.Module,
    full_layout: ModelLayout,
    layout: ModelLayout,
    split_plan: PipelineSplitPlan,
    topology: Topology,
    *,
    device: torch.device,
) -> PipelineRuntime:
    """The rank's runner, once the model is complete. Collective. `full_layout`: the layout before the split."""
    schedule = split_plan.schedule
    placement = schedule.stage_to_rank
    down, up = _group(topology), _group(topology)
    ahead = RECEIVES_AHEAD if dist.get_backend(down) == "gloo" else 0
    links = StageLinks(ranks=topology.pp_ranks, place=topology.pp_rank, down=down, up=up, ahead=ahead)
    stages = Stages(model, split_plan.split, split_plan.own)
    runner = ScheduleRunner(schedule, stages, links, device=device)
    if split_plan.calls is not None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        versions = WeightStash(model, trained)
        runner = NoFlushRunner(split_plan.calls, stages, links, versions, across=_group(topology), device=device)
    shared = _shared(full_layout, split_plan) if placement[0] != placement[-1] else ()
    if shared and schedule.update_period == 1:
        raise PipelineError(
            f"{schedule.name} updates each stage separately, and the first and the last stage share {shared[0]}",
            hint="use pipeline.schedule = 'pipedream_2bw', or a model whose head is not tied",
        )
    group = pair_group(topology, placement[0], placement[-1]) if shared else None
    here = {canonical: name for name, canonical in layout.copies.items()}
    is_end = topology.pp_rank in (placement[0], placement[-1])
    names = tuple(here.get(canonical, canonical) for canonical in shared) if is_end else ()
    return PipelineRuntime(
        schedule_runner=runner,
        shared=SharedWeights(names, group),
        has_first=0 in split_plan.own,
        has_loss=runner.stages.last in split_plan.own,
    )


def _shared(full_layout: ModelLayout, split_plan: PipelineSplitPlan) -> tuple[str, ...]:
    """Canonical names of weights that the first and the last stage both use."""
    before = split_plan.split.before
    return tuple(
        sorted(
            {canonical for alias, canonical in full_layout.ties.items() if (alias in before) != (canonical in before)}
        )
    )


def _group(topology: Topology) -> dist.ProcessGroup:
    """A new group of this rank's pipeline; collective."""
    size = topology.stage_size
    rank_lists = [list(range(place, dist.get_world_size(), size)) for place in range(size)]
    return topology.groups.new_partition(rank_lists, title="pipeline")
