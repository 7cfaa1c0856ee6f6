"""Which mesh axes shard each parameter and which replicate it, and which chunks of the full tensor a rank holds.

Read from live tensors and the table of shards. Norm, clipping, coverage, values and checkpoints follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public form; tests pin it

from weft.core.records import ParameterRecord
from weft.core.shards import Chunk, LocalShard, replicated_shard
from weft.models.adapter.quantised import codes_by_name, full_shape
from weft.models.layout import ModelLayout

LocalShards = Mapping[str, LocalShard]  # by parameter name; empty without tensor parallelism


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which the tensor's shards differ."""
    if not isinstance(tensor, DTensor):
        return ()
    named = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(name for name, placement in named if placement.is_shard())


def local_index(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The global slice that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def chunks_of(tensor: torch.Tensor, shard: LocalShard | None) -> tuple[Chunk, ...]:
    """The chunks of the full tensor that `local(tensor)` consists of; `tensor` may be a shard of a shard."""
    return (shard or replicated_shard(tensor.shape, copies=1)).within(local_index(tensor))


def parameter_records(
    model: nn.Module,
    layout: ModelLayout,
    axis_names_of: Callable[[Sequence[str]], tuple[str, ...]],
    *,
    shards: LocalShards,
    reasons: Mapping[str, str],
) -> list[ParameterRecord]:
    """One row per parameter name, tied aliases included. `axis_names_of`: the mesh axes of a sharded parameter."""
    rows, in_codes = [], codes_by_name(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = layout.ties.get(name)
        shard = shards.get(canonical or name)
        sharded = sharded_axes(parameter) + (shard.sharded_axes if shard is not None else ())
        rows.append(
            ParameterRecord(
                name=name,
                shape=shard.shape if shard else full_shape(parameter, in_codes.get(name)),
                dtype=str(parameter.dtype).removeprefix("torch."),
                unit=layout.unit_of[canonical or name],
                sharded_axes=sharded,
                replicated_axes=tuple(axis for axis in axis_names_of(sharded) if axis not in sharded),
                local_elements=0 if canonical else local(parameter).numel(),
                tied_to=canonical,
                trainable=parameter.requires_grad,
                reason=reasons.get(canonical or name, ""),
            )
        )
    return rows
