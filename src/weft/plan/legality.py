"""The table of legality rules of a plan and its run, each with a sentence, a hint and an error: all verbs use it.

Rules that need the cluster too are the planner's, over columns of plans (`rules.py`); those that the engine would
refuse as well are asked of the run's model here (`model_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from weft.core.adapter_rules import check_adapter
from weft.core.errors import (
    BatchError,
    MeshError,
    ModelError,
    NotBuiltError,
    PipelineError,
    PlanError,
    TensorParallelError,
    WeftError,
)
from weft.core.executable import not_executed_reasons
from weft.core.masters import has_masters_away
from weft.core.objective_rules import check_objective
from weft.core.optimizers import not_executed_with
from weft.core.plan import Plan
from weft.core.plan_checks import check_consistent
from weft.core.router_rules import check_router
from weft.core.run_spec import RunSpec
from weft.core.tensor_grid import row_chunks
from weft.plan.model_rules import (
    Reason,
    block_reasons,
    isolation_reasons,
    known_shape,
    routed_reasons,
    stage_reasons,
    tensor_reasons,
)
from weft.plan.positions import position_reasons
from weft.schedule import check_request


@dataclass(frozen=True)
class LegalityRule:
    """`reasons` is empty for a legal plan; rules of the batch and of sequences need the run.

    `reads_model`: the rule judges [model], which is not the model that trains if a caller has its own."""

    name: str
    error: type[WeftError]
    reasons: Callable[[Plan, RunSpec | None], Iterable[Reason]]
    reads_model: bool = False


def _schedule_reasons(plan: Plan, _run: RunSpec | None) -> list[Reason]:
    """Why the plan's pipeline has no schedule for its ranks and micro-batches."""
    if plan.mesh.pp == 1:
        return []
    pipeline = plan.pipeline
    sentences = check_request(
        pipeline.schedule,
        num_ranks=plan.mesh.pp,
        num_microbatches=pipeline.microbatches,
        virtual_stages=pipeline.virtual_stages,
    )
    hint = "change pipeline.schedule, pipeline.microbatches or pipeline.virtual_stages"
    return [(sentence, hint) for sentence in sentences]


def _batch_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """The batch divides over data-parallel ranks, micro-batches and the rows of a grid."""
    if run is None:
        return
    global_batch, chunks = run.train.global_batch, row_chunks(plan.tensor_parallel.mode, plan.mesh.tp)
    divisor = plan.mesh.dp_degree * plan.pipeline.microbatches * chunks
    if global_batch % divisor:
        below, above = global_batch // divisor * divisor, -(-global_batch // divisor) * divisor
        in_grid = f" x {chunks} rows of the {plan.tensor_parallel.mode} grid" if chunks > 1 else ""
        yield (
            f"a global batch of {global_batch} does not divide over {plan.mesh.dp_degree} data-parallel ranks"
            f" x {plan.pipeline.microbatches} micro-batches{in_grid}",
            f"set train.global_batch to {f'{below} or ' if below else ''}{above}, or change the plan",
        )


def _sequence_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """With sequence parallelism a sequence divides over tensor-parallel ranks."""
    if run is None:
        return
    tp, policy, length = plan.mesh.tp, plan.tensor_parallel, run.data.sequence_length
    if tp > 1 and plan.mesh.cp == 1 and policy.mode == "1d" and policy.sequence_parallel and length % tp:
        near = [value for value in (length // tp * tp, -(-length // tp) * tp) if value]
        yield (
            f"a sequence of {length} does not divide over {tp} tensor-parallel ranks",
            f"set data.sequence_length to {' or '.join(map(str, near))}, or tensor_parallel.sequence_parallel to false",
        )


def _position_reasons(_plan: Plan, run: RunSpec | None) -> list[Reason]:
    """The model has a position for every token of a row."""
    return position_reasons(run) if run is not None else []


def _router_reasons(plan: Plan, run: RunSpec | None) -> Iterable[Reason]:
    """The layout can train with the keys of [router]."""
    return check_router(plan, run.router) if run is not None else []


def _adapter_reasons(plan: Plan, run: RunSpec | None) -> Iterable[Reason]:
    """The layout can train the adapter of the run."""
    return check_adapter(plan, run.adapter) if run is not None else []


def _expert_reasons(plan: Plan, run: RunSpec | None) -> list[Reason]:
    """Every rank of ep holds an expert of the run's model."""
    if run is None or plan.mesh.ep == 1:
        return []
    from weft.plan.ep.rules import check_experts  # numpy, and torch for an unknown config: only experts need them

    shape = known_shape(run)
    return check_experts(shape, plan.mesh.ep) if shape is not None else []


def _context_reasons(plan: Plan, run: RunSpec | None) -> list[Reason]:
    """The positions of the run's rows can be divided."""
    if run is None or plan.mesh.cp == 1:
        return []
    from weft.plan.cp.families import check_context  # torch: the model's own forward answers

    return check_context(plan, run, known_shape(run))


def _chunk_reasons(plan: Plan, run: RunSpec | None) -> list[Reason]:
    """The MLPs of the run's model can run in chunks of positions."""
    if run is None or not plan.activations.sequence_chunk:
        return []
    from weft.plan.chunked_mlps import check_chunked_mlps  # torch: the model's own modules answer

    return check_chunked_mlps(run)


def _offload_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """8-bit moments leave alone, for host memory."""
    is_eight = run is not None and run.train.optimizer == "adamw8bit" and plan.offload.optimizer != "none"
    if is_eight and (plan.offload.optimizer == "nvme" or has_masters_away(plan)):
        yield (
            "states in files, and masters or weights on the host, are not executed with train.optimizer = 'adamw8bit'",
            "set offload.optimizer = 'cpu' alone, or use adamw with precision.optimizer_state = 'bfloat16'",
        )


def _optimizer_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """The optimizer is executed in this layout and precision."""
    if run is not None:
        yield from not_executed_with(run.train.optimizer, plan, ema_decay=run.train.ema_decay)


def _copy_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """Copies of the state between steps need a state that ends with the step and is in memory."""
    if run is None or not run.checkpoint.memory_every:
        return
    hint = "set checkpoint.memory_every = 0; checkpoints on disk are taken as before"
    if plan.has_delayed_updates:
        yield f"checkpoint.memory_every with {plan.delayed_by} is not executed: a copy would drain it", hint
    if plan.offload.optimizer == "nvme":
        yield "checkpoint.memory_every with states in files is not executed: offload.durable = 'step' keeps them", hint


def _bad_step_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """An update can be refused before it is made, and a rewind finds the states of its checkpoint."""
    policy = run.train.on_bad_step if run is not None else None
    if run is None or policy is None:
        return
    hint = "leave train.on_bad_step out: a loss that is not finite then ends the run"
    if plan.has_delayed_updates:
        yield f"train.on_bad_step with {plan.delayed_by} is not executed: weights change before a loss is known", hint
    if plan.offload.optimizer == "nvme":
        yield "train.on_bad_step with states in files (offload.optimizer = 'nvme') is not executed", hint
    if plan.data_parallel.error_feedback:
        yield (
            "train.on_bad_step with data_parallel.error_feedback is not executed: gradients are sent, and their errors "
            "kept, before a norm is known",
            "remove data_parallel.error_feedback, or train.on_bad_step",
        )
    if policy == "rewind" and run.checkpoint.memory_every:
        yield (
            "train.on_bad_step = 'rewind' with checkpoint.memory_every is not executed: the copies would be newer",
            "set checkpoint.memory_every = 0, or train.on_bad_step to skip or stop",
        )


def _sample_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """Every rank sees the logits of the next token."""
    if run is None or not run.samples.every:
        return
    hint = "set samples.every = 0; weft generate samples from a checkpoint of the run"
    if plan.mesh.pp > 1 or plan.mesh.cp > 1:
        yield f"samples.every with {'mesh.pp' if plan.mesh.pp > 1 else 'mesh.cp'} is not executed", hint
    if plan.mesh.tp > 1 and plan.tensor_parallel.mode != "1d":
        yield "samples.every with tensor parallelism on a grid is not executed", hint
    if plan.data_parallel.is_threaded:
        yield "samples.every with strategy = 'dataparallel' is not executed", hint


def _objective_reasons(plan: Plan, run: RunSpec | None) -> Iterable[Reason]:
    """There is an objective for the rows of the run, and the layout trains it."""
    return check_objective(plan, run) if run is not None else []


RULES = (
    LegalityRule("consistent", PlanError, lambda plan, _: check_consistent(plan)),
    LegalityRule("executable", NotBuiltError, lambda plan, _: not_executed_reasons(plan)),
    LegalityRule("schedule", PlanError, _schedule_reasons),
    LegalityRule("batch", BatchError, _batch_reasons),
    LegalityRule("sequence", BatchError, _sequence_reasons),
    LegalityRule("router", NotBuiltError, _router_reasons),
    LegalityRule("adapter", NotBuiltError, _adapter_reasons),
    LegalityRule("experts", MeshError, _expert_reasons, reads_model=True),
    LegalityRule("context", MeshError, _context_reasons, reads_model=True),
    LegalityRule("chunks", ModelError, _chunk_reasons, reads_model=True),
    LegalityRule("offload", NotBuiltError, _offload_reasons),
    LegalityRule("optimizer", NotBuiltError, _optimizer_reasons),
    LegalityRule("copies", NotBuiltError, _copy_reasons),
    LegalityRule("samples", NotBuiltError, _sample_reasons),
    LegalityRule("bad steps", NotBuiltError, _bad_step_reasons),
    LegalityRule("objective", NotBuiltError, _objective_reasons),
    LegalityRule("positions", ModelError, _position_reasons, reads_model=True),  # after all that import no torch
    LegalityRule("router of model", ModelError, routed_reasons, reads_model=True),
    LegalityRule("isolation", NotBuiltError, isolation_reasons, reads_model=True),
    LegalityRule("tensor", TensorParallelError, tensor_reasons, reads_model=True),
    LegalityRule("stages", PipelineError, stage_reasons, reads_model=True),
    LegalityRule("blocks", PlanError, block_reasons, reads_model=True),
)


def broken_rules(plan: Plan, run: RunSpec | None = None, *, has_own_model: bool = False) -> Iterator[WeftError]:
    """An error per reason against training `run` under `plan`; without a run, against the plan alone.

    `has_own_model`: a caller's own trains, which run.model does not describe; the engine judges it."""
    for rule in RULES:
        for sentence, hint in rule.reasons(plan, run) if not (rule.reads_model and has_own_model) else ():
            yield rule.error(sentence, hint=hint)


def require_legal(plan: Plan, run: RunSpec | None = None, *, has_own_model: bool = False) -> None:
    """Raise the first reason against training."""
    for error in broken_rules(plan, run, has_own_model=has_own_model):
        raise error


def is_legal(plan: Plan, run: RunSpec | None = None, *, has_own_model: bool = False) -> bool:
    return next(broken_rules(plan, run, has_own_model=has_own_model), None) is None
