"""Forms of offload, and features beside it, that this version's engine does not execute: states, weights and
activations outside of the device. Each as (whether the plan has it, sentence part); `executable` says the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.masters import has_wide_masters
from weft.core.plan import Plan


def not_offloaded(plan: Plan) -> list[tuple[bool, str]]:
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
        (is_on and plan.data_parallel.is_threaded, "optimizer offload (offload.optimizer) with dataparallel"),
    ]


def offload_switches(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """Those with a switch, which the hint names."""
    yield (
        plan.offload.parameters != "none" and plan.offload.optimizer != "cpu",
        f"parameter offload (offload.parameters) with offload.optimizer = {plan.offload.optimizer!r}",
        "set offload.optimizer = 'cpu'",
    )
    yield from _not_kept(plan)
    yield from _not_staged(plan)


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
