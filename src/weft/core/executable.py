"""Plan features that this version's engine does not execute yet: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.communication_rules import not_communicated
from weft.core.errors import NotBuiltError
from weft.core.offload_rules import not_offloaded, offload_switches
from weft.core.plan import BUCKET_BYTES, SECTIONS, Plan
from weft.core.plan_checks import check_consistent

MOST_KEYS = 2  # that a hint names


def require_executable(plan: Plan) -> None:
    """Refuse a plan with a feature that this version's engine does not execute."""
    for sentence, hint in not_executed_reasons(plan):
        raise NotBuiltError(sentence, hint=hint)


def not_executed_reasons(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every feature of the plan that this version's engine does not execute, as (sentence, hint)."""
    for sentence, hint in _refused(plan):
        yield sentence, hint or _hint_of_removal(plan, sentence)


def _hint_of_removal(plan: Plan, sentence: str) -> str:
    """Keys without which the plan is consistent and not refused with `sentence`, found by leaving each out."""
    tables, found = plan.model_dump(exclude_defaults=True), list[str]()
    for section, key in [(name, key) for name in reversed(SECTIONS) for key in tables.get(name, {})]:
        left = {name: value for name, value in tables[section].items() if name != key}
        other = Plan.model_validate({**tables, section: left})
        if not check_consistent(other) and sentence not in [said for said, _ in _refused(other)]:
            found.append(f"set mesh.{key} = 1" if section == "mesh" else f"remove {section}.{key}")
    return f"{', or '.join(found[:MOST_KEYS]) or 'change that part of the plan'}; docs/status.md lists what works"


def _refused(plan: Plan) -> Iterator[tuple[str, str]]:
    """(sentence, hint) of every refusal; the hint is empty if leaving out a key is all that helps."""
    default = Plan()
    policy = plan.precision.policy()
    refused: list[tuple[bool, str]] = [
        (
            plan.never_flushes and plan.data_parallel.zero > 0,
            f"{plan.pipeline.schedule} with sharded weights (data_parallel.zero > 0)",
        ),
        (
            plan.has_delayed_updates and policy.loss_scaling,
            f"{plan.delayed_by} with a loss scale (precision fp16)",
        ),
        (plan.mesh.pp > 1 and plan.tensor_parallel.mode != "1d" and plan.mesh.tp > 1, "a pipeline of grids"),
        (
            plan.mesh.ep > 1 and plan.mesh.tp > 1 and plan.tensor_parallel.mode != "1d",
            f"expert parallelism (mesh.ep > 1) with tensor_parallel.mode = {plan.tensor_parallel.mode!r}",
        ),
        (
            plan.mesh.ep > 1 and plan.has_delayed_updates,
            f"expert parallelism (mesh.ep > 1) with {plan.delayed_by}",
        ),
        (plan.pipeline.virtual_stages > 1 and plan.mesh.pp == 1, "virtual pipeline stages without a pipeline"),
        (
            plan.activations != default.activations and plan.data_parallel.is_threaded,
            "activation recompute under dataparallel",
        ),
        (
            plan.data_parallel.zero > 0 and plan.data_parallel.bucket_bytes != BUCKET_BYTES,
            "data_parallel.bucket_bytes with data_parallel.zero > 0, where blocks are reduced one by one",
        ),
        (
            policy.has_wide_logits and plan.mesh.tp > 1,
            "precision.logits = 'float32' beside weights in 16 bits with tensor parallelism",
        ),
        *((plan.mesh.cp > 1 and has, f"context parallelism (mesh.cp > 1) with {what}") for has, what in _not_cp(plan)),
        *not_communicated(plan),
        *not_offloaded(plan),
    ]
    said = f"precision.residual = {policy.residual!r} beside weights in {policy.weights}"
    refused += [(policy.has_wide_residual and has, f"{said} with {what}") for has, what in _not_wide_residual(plan)]
    refused += [(has, f"precision.{name} = 'bfloat16' with {what}") for has, name, what in _not_low(plan)]
    own = policy.has_own_gradients
    said = f"precision.gradients = {policy.gradients!r} beside master weights in {policy.master_weights}"
    refused += [(own and has, f"{said} with {what}") for has, what in _not_own_gradients(plan)]
    for is_refused, what, hint in [*((is_refused, what, "") for is_refused, what in refused), *_switched_on(plan)]:
        if is_refused:
            yield f"this version of weft does not execute {what}", hint


def _not_cp(plan: Plan) -> list[tuple[bool, str]]:
    """Features that context parallelism does not support yet."""
    mesh = plan.mesh
    return [
        (mesh.tp > 1 and plan.tensor_parallel.mode != "1d", f"tensor_parallel.mode = {plan.tensor_parallel.mode!r}"),
        (mesh.ep > 1 and plan.data_parallel.zero == 0, "expert parallelism and data_parallel.zero = 0"),
        (plan.never_flushes, plan.delayed_by),
        (plan.data_parallel.is_threaded, "dataparallel"),
    ]


def _switched_on(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """Features with a switch, which a plan may have inherited from another run: the hint names the switch."""
    for has, what in _not_compiled(plan):
        yield plan.compile.enabled and has, f"compiled blocks with {what}", "set compile.enabled = false"
    for has, what in _not_fused(plan):
        is_refused = plan.kernels.loss == "fused" and has
        yield is_refused, f"a fused loss (kernels.loss) with {what}", "set kernels.loss = 'whole'"
    for has, what in _not_chunked(plan):
        is_refused = plan.activations.sequence_chunk > 0 and has
        yield is_refused, f"activations.sequence_chunk with {what}", "set activations.sequence_chunk = 0"
    yield from offload_switches(plan)
    for has, what in _not_float8(plan):
        is_on = plan.float8.linears != "none" or plan.float8.experts != "none"
        on = [name for name in ("linears", "experts") if getattr(plan.float8, name) != "none"]
        yield is_on and has, f"float8 with {what}", " and ".join(f"set float8.{name} = 'none'" for name in on)
    yield (
        plan.has_delayed_updates and plan.float8.linears != "none" and plan.float8.recipe == "delayed",
        f"float8.recipe = 'delayed' with {plan.delayed_by}: scales and weights would be of different steps",
        "set float8.recipe = 'tensorwise'",
    )
    yield (
        plan.never_flushes and plan.float8.measure_every > 0,
        f"float8.measure_every with {plan.delayed_by}: micro-batches of several steps are in flight",
        "set float8.measure_every = 0",
    )


def _not_chunked(plan: Plan) -> list[tuple[bool, str]]:
    """Features that chunks of positions do not support yet."""
    activations = plan.activations
    is_float8 = plan.float8.linears != "none" or plan.float8.experts != "none"
    return [
        # the numbers are right; traffic by chunk is not predicted, and verify compares it
        (plan.mesh.tp > 1, "tensor parallelism (mesh.tp > 1)"),
        (plan.mesh.ep > 1, "expert parallelism (mesh.ep > 1)"),
        (
            activations.is_selective or activations.is_open,
            f"activations.policy = {activations.policy!r}, which keeps outputs of matmuls of the blocks",
        ),
        (activations.offload_blocks != 0, "activations.offload_blocks, which keeps saved tensors of blocks"),
        (is_float8, "float8 products, whose scales are of whole tensors"),
        _split_backward(plan),
    ]


def why_not_compiled(plan: Plan) -> str:
    """The plan's first feature that compiled blocks do not support yet, or ""."""
    return next((what for has, what in _not_compiled(plan) if has), "")


def why_not_fused(plan: Plan) -> str:
    """The plan's first feature that a fused loss does not support yet, or ""."""
    return next((what for has, what in _not_fused(plan) if has), "")


def _not_compiled(plan: Plan) -> list[tuple[bool, str]]:
    """Features that compiled blocks do not support yet."""
    return [
        (plan.mesh.tp > 1, "tensor parallelism"),
        _split_backward(plan),
        (plan.data_parallel.is_threaded, "dataparallel"),
        (plan.activations.is_selective, "selective recompute"),
        (plan.activations.sequence_chunk > 0, "MLPs in chunks (activations.sequence_chunk)"),
        (plan.precision.policy().has_wide_residual, "a residual stream in float32 (precision.residual)"),
    ]


def _not_fused(plan: Plan) -> list[tuple[bool, str]]:
    """Features that a loss fused with its head does not support yet."""
    tensor = plan.tensor_parallel
    return [
        (plan.mesh.tp > 1 and tensor.mode != "1d", f"tensor_parallel.mode = {tensor.mode!r}"),
        (plan.data_parallel.is_threaded, "dataparallel"),
        (plan.precision.policy().has_wide_logits, "logits in float32 (precision.logits)"),
    ]


def _not_float8(plan: Plan) -> list[tuple[bool, str]]:
    mode = plan.tensor_parallel.mode
    return [
        (plan.mesh.tp > 1 and mode != "1d", f"tensor_parallel.mode = {mode!r}"),
        (plan.data_parallel.is_threaded, "dataparallel"),
        (plan.precision.policy().weights != "bfloat16", "weights other than bfloat16 (precision.preset = 'bf16')"),
    ]


def _not_wide_residual(plan: Plan) -> list[tuple[bool, str]]:
    """Features that a float32 residual stream beside 16 bits does not support yet."""
    mesh, activations = plan.mesh, plan.activations
    is_away = activations.offload != "none" or activations.offload_blocks != 0
    return [
        (mesh.tp > 1 and plan.tensor_parallel.mode != "1d", f"tensor_parallel.mode = {plan.tensor_parallel.mode!r}"),
        (is_away, "activations that leave the device (activations.offload)"),
        (plan.float8.linears != "none" or plan.float8.experts != "none", "float8 products"),
        (plan.precision.policy().loss_scaling, "a loss scale (precision fp16)"),
        (plan.data_parallel.is_threaded, "dataparallel"),
    ]


def _not_own_gradients(plan: Plan) -> list[tuple[bool, str]]:
    """Features that gradients of another dtype than the master weights do not support yet."""
    return [
        (plan.offload.optimizer != "none", "offload.optimizer"),
        (plan.never_flushes, plan.delayed_by),
        (plan.data_parallel.is_threaded, "dataparallel"),
        # sums of micro-batches are rounded at other places than those of one process
        (
            plan.data_parallel.zero >= 2 and plan.pipeline.microbatches > 1,
            "several micro-batches and sharded gradients",
        ),
    ]


def _not_low(plan: Plan) -> list[tuple[bool, str, str]]:
    """Features that bfloat16 optimizer states and weights do not support yet."""
    policy = plan.precision.policy()
    is_master_free = policy.master_weights == "bfloat16"
    return [
        (
            policy.has_low_states and plan.has_delayed_updates,
            "master_weights" if is_master_free else "optimizer_state",
            plan.delayed_by,
        ),
    ]


def _split_backward(plan: Plan) -> tuple[bool, str]:
    """Schedules that defer weight gradients: matmuls inside a compiled graph cannot be split."""
    is_split = plan.mesh.pp > 1 and plan.pipeline.splits_backwards
    return is_split, f"pipeline.schedule = {plan.pipeline.schedule!r}, which splits the backward"
