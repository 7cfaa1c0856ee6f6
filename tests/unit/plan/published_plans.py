"""A published run as a question to the planner and as a plan. Shared by the test and the benchmark of published runs.

What the table does not say is decided here: Megatron, NeMo and Meta's trainer count as compiled, since they have fused
kernels of their own; everything else counts as compiled where the run says so. Attention that the document calls
materialised is "eager". Megatron-DeepSpeed had no sequence parallelism. Runs in float8 have it in every linear layer
of the blocks; torchtitan's weights travel so too. Experts in float8 are no part of a plan.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from published_runs import PublishedRun, published_runs

from weft import hardware, zoo
from weft.core.model_shape import LinearShape, ModelShape
from weft.core.plan import Plan
from weft.core.stages import even_partition
from weft.models.shape.lookup import shape_from_type
from weft.plan.columns import SCHEDULES
from weft.plan.estimate import Estimate, estimate
from weft.plan.request import Request, Workload

HAS_FUSED_KERNELS = ("Megatron", "Meta")
WITHOUT_SEQUENCE_PARALLELISM = ("Megatron-DeepSpeed",)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run: published, predicted."""

    run: PublishedRun
    predicted: Estimate

    @property
    def published_s(self) -> float:
        assert self.run.step_s is not None
        return self.run.step_s

    @property
    def error(self) -> float:
        """Above 0: the run was faster than predicted."""
        return self.predicted.step_s / self.published_s - 1


def comparable_runs() -> list[PublishedRun]:
    """Confirmed, with a step time, in 16 bits or more."""
    return [run for run in _timed_runs() if run.precision != "fp8"]


def float8_runs() -> list[PublishedRun]:
    """The same in float8, with a schedule that plans have."""
    return [run for run in _timed_runs() if run.precision == "fp8" and run.schedule in ("", *SCHEDULES)]


def _timed_runs() -> list[PublishedRun]:
    return [run for run in published_runs() if run.confirmed and run.step_s is not None]


def cut_everywhere(shape: ModelShape) -> ModelShape:
    """As Megatron cuts it: weft leaves attention with ALiBi whole."""
    kinds = (
        replace(kind, linears=tuple(_cut(linear, shape.hidden_size) for linear in kind.linears)) for kind in shape.kinds
    )
    return replace(shape, kinds=tuple(kinds))


def _cut(linear: LinearShape, hidden_size: int) -> LinearShape:
    if linear.style != "replicated" or not linear.name.startswith("self_attention."):
        return linear
    return replace(linear, style="row" if linear.out_features == hidden_size else "column")


def shape_of_run(run: PublishedRun) -> ModelShape:
    return zoo.named(run.model) if run.model else shape_from_type(run.type, run.config)


def request_of_run(run: PublishedRun) -> Request:
    shape = shape_of_run(run)
    return Request(
        shape=cut_everywhere(shape) if shape.model_type == "bloom" else shape,
        cluster=hardware.cluster(run.devices),
        workload=Workload(
            global_batch=run.global_batch,
            sequence_length=run.sequence_length,
            attention="eager" if run.attention == "materialised" else "fused",
        ),
        precision=plan_of_run(run).precision.policy(),
    )


def plan_of_run(run: PublishedRun) -> Plan:
    shard = run.dp_shard or (run.dp if run.zero else 1)
    is_compiled = run.compile or any(name in run.framework for name in HAS_FUSED_KERNELS)
    has_sequence_parallelism = (
        "no sequence parallelism" not in run.note and run.framework not in WITHOUT_SEQUENCE_PARALLELISM
    )
    # these frameworks deal layers evenly, whatever the head costs
    layers, stages = shape_of_run(run).num_layers, run.pp * run.virtual_stages
    tables: dict[str, Any] = {
        "mesh": {
            "dp_replicate": run.dp // shard,
            "dp_shard": shard,
            "cp": run.cp,
            "tp": run.tp,
            "pp": run.pp,
            "ep": run.ep,
        },
        "data_parallel": {"zero": run.zero},
        "tensor_parallel": {"sequence_parallel": has_sequence_parallelism},
        "pipeline": {
            "schedule": run.schedule or "1f1b",
            "microbatches": run.microbatches,
            "virtual_stages": run.virtual_stages,
            "blocks": even_partition(layers, stages) if run.pp > 1 and stages <= layers else [],
        },
        "activations": {"policy": run.recompute},
        **_precision(run),
        "compile": {"enabled": is_compiled},
    }
    return Plan.from_tables(tables, source=run.id)


def _precision(run: PublishedRun) -> dict[str, Any]:
    if run.precision != "fp8":
        return {"precision": {"preset": run.precision}}
    gather = "float8" if run.framework == "torchtitan" else "weights"
    return {"precision": {"preset": "bf16"}, "float8": {"linears": "all", "gather": gather}}


def compare(run: PublishedRun) -> Comparison:
    return Comparison(run=run, predicted=estimate(request_of_run(run), plan_of_run(run)))


def median_size(comparisons: Iterable[Comparison]) -> float:
    """The median of the errors' sizes."""
    return statistics.median(abs(each.error) for each in comparisons)


def by_framework(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = defaultdict(list)
    for each in comparisons:
        groups[each.run.framework].append(each)
    return dict(groups)
