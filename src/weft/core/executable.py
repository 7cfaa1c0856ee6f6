"""Plan features that this version's engine does not execute yet: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.errors import NotBuiltError
from weft.core.masters import has_wide_masters
from weft.core.plan import BUCKET_BYTES, SECTIONS, Plan
from weft.core.plan_checks import check_consistent
from weft.core.wire_bytes import CODED

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
            plan.activations != default.activations and plan.data_parallel.strategy == "dataparallel",
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
        *_not_summed(plan),
        *_not_coded(plan),
        *_not_secondary(plan),
        *_not_offloaded(plan),
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
        (_is_threaded(plan), "dataparallel"),
    ]


def _not_summed(plan: Plan) -> list[tuple[bool, str]]:
    """Layouts whose gradients are summed by torch alone."""
    dp, mesh = plan.data_parallel, plan.mesh
    is_chosen, what = dp.all_reduce != "auto", f"data_parallel.all_reduce = {dp.all_reduce!r}"
    is_sharded = dp.zero > 0 and mesh.dp_replicate == 1
    return [
        (
            is_chosen and is_sharded,
            f"{what} with sharded gradients (data_parallel.zero > 0), which no rank all-reduces",
        ),
        (
            is_chosen and dp.zero > 0 and mesh.dp_replicate > 1 and mesh.pp == 1,
            f"{what} with HSDP outside of a pipeline, where fully_shard sums over the replicas",
        ),
        (is_chosen and _is_threaded(plan), f"{what} with dataparallel"),
    ]


def _not_coded(plan: Plan) -> list[tuple[bool, str]]:
    """Layouts whose gradients do not travel as codes."""
    policy, dp = plan.precision.policy(), plan.data_parallel
    is_on, what = policy.has_coded_sums, f"precision.reduce = {policy.reduce!r}"
    is_grid = plan.mesh.tp > 1 and plan.tensor_parallel.mode != "1d"
    grid = f"tensor_parallel.mode = {plan.tensor_parallel.mode!r}"
    return [
        (is_on and _is_threaded(plan), f"{what} with dataparallel, which has no ranks"),
        (is_on and dp.all_reduce != "auto", f"{what} with data_parallel.all_reduce: codes travel as an all-to-all"),
        (is_on and plan.has_delayed_updates, f"{what} with {plan.delayed_by}"),
        (policy.reduce in CODED and is_grid, f"{what} with {grid}: scales differ between copies of a parameter"),
        (is_on and dp.find_unused_parameters, f"{what} with data_parallel.find_unused_parameters"),
        (
            is_on and plan.mesh.ep > 1 and dp.zero == 0,
            f"{what} with replicated experts (mesh.ep > 1, data_parallel.zero = 0), whose gradients are summed one by "
            "one",
        ),
        (
            dp.reduce_neighbours > 0 and plan.mesh.ep > 1,
            "data_parallel.reduce_neighbours with expert parallelism (mesh.ep > 1), whose experts other ranks reduce",
        ),
        *(
            (dp.error_feedback and has, f"data_parallel.error_feedback with {name}")
            for has, name in (
                (is_grid, grid),
                (
                    plan.mesh.pp > 1 and dp.zero > 1 and plan.pipeline.is_v_shaped,
                    f"data_parallel.zero = {dp.zero} and pipeline.schedule = {plan.pipeline.schedule!r}, whose first "
                    "rank reduces the parts of a unit one by one",
                ),
                (policy.loss_scaling, "a loss scale (precision fp16), which changes from step to step"),
                (plan.offload.optimizer == "nvme", "states in files (offload.optimizer = 'nvme')"),
            )
        ),
        *(
            (bool(plan.coded_gather) and has, f"precision.gather = {policy.gather!r} with {name}")
            for has, name in (
                (plan.offload.parameters != "none", "parameter offload (offload.parameters)"),
                (plan.has_delayed_updates, plan.delayed_by),
                (is_grid, f"{grid}: scales differ between copies of a parameter, which would no longer be equal"),
            )
        ),
    ]


def _not_secondary(plan: Plan) -> list[tuple[bool, str]]:
    """Layouts whose units are gathered in another order than forward, backward, or change in between."""
    size = plan.data_parallel.secondary_shard
    return [
        (size > 0 and has, f"data_parallel.secondary_shard = {size} with {what}")
        for has, what in (
            (plan.mesh.pp > 1, "a pipeline (mesh.pp > 1)"),
            (plan.mesh.ep > 1, "expert parallelism (mesh.ep > 1)"),
            (plan.offload.parameters != "none", "parameter offload (offload.parameters)"),
            (plan.has_delayed_updates, plan.delayed_by),
        )
    ]


def _not_offloaded(plan: Plan) -> list[tuple[bool, str]]:
    """Forms of offload, and features that optimizer offload does not support yet."""
    offload = plan.offload
    is_on = offload.optimizer != "none"
    has_files = bool(offload.folder) or offload.durable != "checkpoint"
    return [
        (has_files and offload.optimizer != "nvme", "offload.folder and offload.durable without states in files"),
        (
            offload.parameters != "none" and plan.float8.linears != "none" and plan.float8.gather == "float8",
            "parameter offload (offload.parameters) with weights gathered in float8 (float8.gather)",
        ),
        (
            offload.parameters != "none" and plan.data_parallel.zero == 0 and plan.mesh.dp_degree > 1,
            "parameter offload (offload.parameters) with replicas of all weights (data_parallel.zero = 0)",
        ),
        (not is_on and offload.update != "auto", "offload.update without offload.optimizer"),
        (not is_on and offload.masters == "host", "offload.masters without offload.optimizer"),
        (
            offload.masters == "host" and not has_wide_masters(plan),
            "offload.masters = 'host' with weights that are their own masters (precision)",
        ),
        (not is_on and offload.chunk_elements is not None, "offload.chunk_elements without offload.optimizer"),
        (is_on and plan.never_flushes, f"optimizer offload (offload.optimizer) with {plan.pipeline.schedule}"),
        *((offload.delayed and has, f"offload.delayed {what}") for has, what in _not_delayed(plan)),
        (is_on and _is_threaded(plan), "optimizer offload (offload.optimizer) with dataparallel"),
    ]


def _not_delayed(plan: Plan) -> list[tuple[bool, str]]:
    """Keys of offload that make no sense beside a delayed update, or are not supported with it yet."""
    offload = plan.offload
    return [
        (offload.optimizer == "none", "without offload.optimizer"),
        (offload.optimizer == "nvme", "with states in files (offload.optimizer = 'nvme')"),
        (offload.parameters != "none", "with offload.parameters"),
        (offload.masters == "host", "with offload.masters = 'host'"),
        (offload.staging_bytes > 0, "with offload.staging_bytes: all copies of the update are beside the next step"),
    ]


def _switched_on(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """Features with a switch, which a plan may have inherited from another run: the hint names the switch."""
    for has, what in _not_compiled(plan):
        yield plan.compile.enabled and has, f"compiled blocks with {what}", "set compile.enabled = false"
    for has, what in _not_fused(plan):
        is_refused = plan.kernels.loss == "fused" and has
        yield is_refused, f"a fused loss (kernels.loss) with {what}", "set kernels.loss = 'whole'"
    yield (
        plan.offload.parameters != "none" and plan.offload.optimizer != "cpu",
        f"parameter offload (offload.parameters) with offload.optimizer = {plan.offload.optimizer!r}",
        "set offload.optimizer = 'cpu'",
    )
    for has, what in _not_chunked(plan):
        is_refused = plan.activations.sequence_chunk > 0 and has
        yield is_refused, f"activations.sequence_chunk with {what}", "set activations.sequence_chunk = 0"
    yield from _not_kept(plan)
    yield from _not_staged(plan)
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


def _not_kept(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """Inputs of fully recomputed blocks can leave the device, or be divided over tensor-parallel ranks; no others."""
    activations, tensor = plan.activations, plan.tensor_parallel
    has_no_full = not activations.may_be_full
    mixture = f" and activations.mixture = {list(activations.mixture)}" if activations.mixture is not None else ""
    which = f"activations.policy = {activations.policy!r}{mixture}: only inputs of fully recomputed blocks"
    blocks = activations.mixture
    full = f"set activations.mixture = [1, {max(blocks[1] - 1, 0)}]" if blocks else "set activations.policy = 'full'"
    has_none_away = has_no_full and not activations.offload_blocks
    more = f"{full}, or activations.offload_blocks"
    yield activations.offload != "none" and has_none_away, f"activations.offload with {which} leave the device", more
    none = "set activations.offload_blocks = 0"
    for is_refused, what, hint in (
        (activations.offload == "none", "activations.offload = 'none'", "set activations.offload = 'cpu'"),
        (
            activations.policy in ("full", "selective"),
            f"activations.policy = {activations.policy!r}: every block is recomputed",
            f"{none}, or activations.policy = 'none' or 'budget'",
        ),
        (plan.mesh.pp > 1, "a pipeline (mesh.pp > 1)", none),
    ):
        yield activations.offload_blocks != 0 and is_refused, f"activations.offload_blocks with {what}", hint
    whole = "set activations.partition = false"
    has_slices = tensor.mode == "1d" and tensor.sequence_parallel
    for is_refused, what, hint in (
        (has_no_full, f"{which} are divided", full),
        (plan.mesh.tp == 1, "mesh.tp = 1: there are no tensor-parallel ranks to divide inputs over", whole),
        (tensor.mode != "1d", f"tensor_parallel.mode = {tensor.mode!r}, where inputs are local shards already", whole),
        (has_slices, "sequence parallel, where inputs of blocks are slices of the sequence already", whole),
    ):
        yield activations.partition and is_refused, f"activations.partition with {what}", hint


def _not_staged(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """Copies hide behind micro-batches if the device updates, and no pipeline interleaves them."""
    offload = plan.offload
    for does_nothing, what in (
        (offload.optimizer == "none", "without offload.optimizer: no states are on their way"),
        (offload.update == "host", "with offload.update = 'host': the host updates, and no states leave it"),
        (plan.mesh.pp > 1, "with a pipeline (mesh.pp > 1), whose backwards do not free activations block by block"),
    ):
        yield (
            offload.staging_bytes > 0 and does_nothing,
            f"offload.staging_bytes {what}",
            "set offload.staging_bytes = 0",
        )


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
        (_is_threaded(plan), "dataparallel"),
        (plan.activations.is_selective, "selective recompute"),
        (plan.activations.sequence_chunk > 0, "MLPs in chunks (activations.sequence_chunk)"),
        (plan.precision.policy().has_wide_residual, "a residual stream in float32 (precision.residual)"),
    ]


def _not_fused(plan: Plan) -> list[tuple[bool, str]]:
    """Features that a loss fused with its head does not support yet."""
    tensor = plan.tensor_parallel
    return [
        (plan.mesh.tp > 1 and tensor.mode != "1d", f"tensor_parallel.mode = {tensor.mode!r}"),
        (_is_threaded(plan), "dataparallel"),
        (plan.precision.policy().has_wide_logits, "logits in float32 (precision.logits)"),
    ]


def _not_float8(plan: Plan) -> list[tuple[bool, str]]:
    mode = plan.tensor_parallel.mode
    return [
        (plan.mesh.tp > 1 and mode != "1d", f"tensor_parallel.mode = {mode!r}"),
        (_is_threaded(plan), "dataparallel"),
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
        (_is_threaded(plan), "dataparallel"),
    ]


def _not_own_gradients(plan: Plan) -> list[tuple[bool, str]]:
    """Features that gradients of another dtype than the master weights do not support yet."""
    return [
        (plan.offload.optimizer != "none", "offload.optimizer"),
        (plan.never_flushes, plan.delayed_by),
        (_is_threaded(plan), "dataparallel"),
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
        (is_master_free and plan.mesh.tp > 1, "master_weights", "tensor parallelism"),
        (is_master_free and plan.mesh.pp > 1, "master_weights", "a pipeline"),
    ]


def _split_backward(plan: Plan) -> tuple[bool, str]:
    """Schedules that defer weight gradients: matmuls inside a compiled graph cannot be split."""
    is_split = plan.mesh.pp > 1 and plan.pipeline.splits_backwards
    return is_split, f"pipeline.schedule = {plan.pipeline.schedule!r}, which splits the backward"


def _is_threaded(plan: Plan) -> bool:
    return plan.data_parallel.strategy == "dataparallel"
