"""Runs and layouts that do not train an objective, and why: one (sentence, hint) each. Declarations alone; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec

# keys that a search of plans fixes for an objective of pairs
FIXED: dict[str, object] = {"mesh.cp": 1, "tensor_parallel.mode": "1d", "kernels.loss": "whole"}
# for a scalar head, which has no vocabulary to shard
FIXED_BY_SCORES: dict[str, object] = {**FIXED, "mesh.tp": 1}
# and for a teacher, which every rank holds
FIXED_BY_TEACHER: dict[str, object] = {
    **dict.fromkeys(("mesh.cp", "mesh.pp", "mesh.ep"), 1),
    "tensor_parallel.mode": "1d",
    "tensor_parallel.loss_parallel": False,
    "kernels.loss": "whole",
}


def check_objective(plan: Plan, run: RunSpec) -> Iterator[tuple[str, str]]:
    """Every reason against training the objective of `run` under `plan`."""
    objective, has_pairs = run.objective, run.data.format == "preference"
    if has_pairs and not objective.is_of_pairs:
        yield (
            f"data.format = 'preference' gives pairs, and objective.kind = {objective.kind!r} does not train on pairs",
            "set objective.kind = 'dpo', 'orpo' or 'reward', or data.format = 'chat' to train on the chosen answers",
        )
    if not objective.reads_logits:
        return
    if objective.is_of_pairs and not has_pairs:
        yield (
            f"objective.kind = {objective.kind!r} needs pairs, and data.format is {run.data.format!r}",
            "set data.format = 'preference', or leave [objective] out",
        )
    for is_refused, what, hint in (*_not_of_layout(plan, run), *_not_of_reference(plan, run)):
        if is_refused:
            yield f"this version of weft does not execute objective.kind = {objective.kind!r} with {what}", hint


def require_next_token(run: RunSpec, verb: str) -> None:
    """Refuse a verb that knows the loss of the next token alone."""
    if run.objective.kind != "next_token":
        raise NotBuiltError(
            f"{verb} does not know objective.kind = {run.objective.kind!r} yet",
            hint="--set objective.kind=next_token with another data.format does the same layout without it",
        )


def _not_of_layout(plan: Plan, run: RunSpec) -> Iterator[tuple[bool, str, str]]:
    mesh, mode, has_teacher = plan.mesh, plan.tensor_parallel.mode, run.objective.kind == "distillation"
    has_score = run.objective.kind == "reward"
    yield has_score and mesh.tp > 1, f"mesh.tp = {mesh.tp}: a scalar head has no vocabulary to shard", "set mesh.tp = 1"
    yield has_score and run.samples.every > 0, "[samples]: a scalar head writes no text", "set samples.every = 0"
    for axis, size in (("cp", mesh.cp), *((("pp", mesh.pp), ("ep", mesh.ep)) if has_teacher else ())):
        yield size > 1, f"mesh.{axis} = {size}", f"set mesh.{axis} = 1"
    is_sliced = has_teacher and mesh.tp > 1 and plan.tensor_parallel.loss_parallel
    yield is_sliced, "tensor_parallel.loss_parallel: a teacher has whole rows of logits", "set it to false"
    flushes = "choose a schedule that flushes, such as 1f1b"
    yield plan.never_flushes, f"pipeline.schedule = {plan.pipeline.schedule!r}", flushes
    is_grid = mesh.tp > 1 and mode != "1d"
    yield is_grid, f"tensor_parallel.mode = {mode!r}", "set tensor_parallel.mode = '1d'"
    is_threaded = plan.data_parallel.is_threaded
    yield is_threaded, "data_parallel.strategy = 'dataparallel'", "set data_parallel.strategy = 'ddp'"
    is_fused = plan.kernels.loss == "fused"
    yield is_fused, "a fused loss (kernels.loss)", "set kernels.loss = 'whole', or leave it out"


def _not_of_reference(plan: Plan, run: RunSpec) -> Iterator[tuple[bool, str, str]]:
    """The reference is computed once, by the run's first weights, for the samples that the run will read."""
    has, hint = run.objective.has_reference, "set objective.reference = 'none'"
    yield has and run.data.streaming, "a reference and data.streaming", f"{hint}, or data.streaming = false"
    is_rewind = run.train.on_bad_step == "rewind"
    skips = "set train.on_bad_step = 'skip'"
    yield has and is_rewind, "a reference and train.on_bad_step = 'rewind', which reads more samples", skips
    is_in_files, what = plan.offload.optimizer == "nvme", "a reference and states in files (offload.optimizer)"
    yield has and is_in_files, what, "set offload.optimizer = 'cpu'"
