"""The engine's state as one flat dict of tensors under logical names, which checkpoints store and load in place.

`model.<parameter>` and `optim.<parameter>.<key>`; persistent buffers under `model.` too (a pipeline stage stores only
those changing buffers that it owns: `engine/buffers/sync.py`). Tensors sharded by `fully_shard` are DTensors, those
sharded by tensor parallelism ShardTensors: a name and a global slice identify every byte in any layout.
Tied parameters appear once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.checkpoint.parts import OF_ONE_RANK, ShardTensor
from weft.core.errors import CheckpointError
from weft.core.plan import Mesh
from weft.core.shards import LocalShard
from weft.engine.offload.slab import is_host_memory, release_of
from weft.engine.optim.adafactor import FACTORS
from weft.engine.optim.adamw_8bit import CODES, SCALES, QuantisedParts, block_size_for, quantised_parts
from weft.engine.ownership import LocalShards, chunks_of, local
from weft.models.adapter.quantised import codes_by_name, dequantise

MODEL = "model."
OPTIMIZER = "optim."
ERRORS = f"{OF_ONE_RANK}errors."


@contextmanager
def meta_read() -> Iterator[None]:
    """Turns errors of reading a checkpoint's `meta`, which may lack scalars of training, into a CheckpointError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"the checkpoint's manifest lacks the state of training ({type(error).__name__}: {error})",
            hint="load a checkpoint that Engine.save or `weft train` has written",
        ) from None


Masters = Mapping[nn.Parameter, torch.Tensor]  # local shards of masters that are offloaded states


def master_tensors(model: nn.Module, shards: LocalShards, masters: Masters) -> dict[str, torch.Tensor]:
    """What updates change, by parameter name: masters, and parameters that are their own. Codes never change."""
    in_codes = codes_by_name(model)
    return {
        name: as_shard(value.detach(), shards.get(name))
        if value not in masters
        else _at_host(masters[value], value, shards.get(name))
        for name, value in model.named_parameters()
        if name not in in_codes
    }


def base_tensors(model: nn.Module, shards: LocalShards) -> dict[str, torch.Tensor]:
    """Values of weights that rest in codes, by parameter name, as `master_tensors` has those of all others."""
    found = {}
    for name, form in codes_by_name(model).items():
        stored = model.get_parameter(name)
        values = dequantise(local(stored.detach()), form, torch.float32)
        own = _placed(values, stored, torch.Size((stored.shape[0], form.columns)))
        found[name] = as_shard(own, shards.get(name))
    return found


def state_tensors(
    model: nn.Module, optimizer: Optimizer, shards: LocalShards, masters: Masters
) -> dict[str, torch.Tensor]:
    """Every tensor that training continues from, by its logical name. They share memory with the live ones."""
    state = {f"{MODEL}{name}": value for name, value in master_tensors(model, shards, masters).items()}
    state.update({f"{MODEL}{name}": buffer for name, buffer in persistent_buffers(model)})
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                shard = shards.get(name)
                if key in FACTORS:  # full on every rank
                    state[f"{OPTIMIZER}{name}.{key}"] = value
                    continue
                if is_on_host(value):
                    state.update(_chunked(f"{OPTIMIZER}{name}.{key}", value, parameter, shard))
                    continue
                shape = shard.shape if shard is not None else parameter.shape
                of_key = _logical(f"{OPTIMIZER}{name}.{key}", value, parameter, full_shape=torch.Size(shape))
                state.update({known: as_shard(tensor, shard) for known, tensor in of_key.items()})
    return state


def error_tensors(errors: Mapping[str, torch.Tensor], mesh: Mesh, *, rank: int) -> dict[str, torch.Tensor]:
    """Errors of gradients that this rank has sent: no other layout has such a rank, so their names have both."""
    layout = "-".join(f"{axis}{degree}" for axis, degree in mesh.sizes().items() if degree > 1)
    return {f"{ERRORS}{layout}.rank{rank}.{name}": one for name, one in errors.items()}


def is_on_host(value: torch.Tensor) -> bool:
    """Whether a state is offloaded."""
    parts = quantised_parts(value)
    return value.ndim > 0 and is_host_memory(parts.codes if parts is not None else value)


def _at_host(own: torch.Tensor, parameter: nn.Parameter, shard: LocalShard | None) -> ShardTensor:
    """A local shard in host memory, laid out as the parameter's: a DTensor would move it to the device."""
    shape = shard.shape if shard is not None else parameter.shape
    return ShardTensor.of(own, shape=shape, chunks=chunks_of(parameter, shard), release=release_of(own))


def _chunked(
    name: str, value: torch.Tensor, parameter: nn.Parameter, shard: LocalShard | None
) -> dict[str, torch.Tensor]:
    """An offloaded state as chunks of the full tensor; an 8-bit one as codes and scales."""
    chunks, shape = chunks_of(parameter, shard), tuple(parameter.shape if shard is None else shard.shape)
    parts = _parts(value, parameter, full_shape=torch.Size(shape))
    if parts is None:
        return {name: _at_host(value, parameter, shard)}
    width = parts.scales.shape[-1]
    of_scales = [replace(chunk, sizes=(*chunk.sizes[:-1], width)) for chunk in chunks]
    return {
        f"{name}{CODES}": ShardTensor.of(parts.codes, shape=shape, chunks=chunks),
        f"{name}{SCALES}": ShardTensor.of(parts.scales, shape=(*shape[:-1], width), chunks=of_scales),
    }


def _parts(value: torch.Tensor, parameter: torch.Tensor, *, full_shape: torch.Size) -> QuantisedParts | None:
    """Codes and scales of an 8-bit moment; None for any other tensor."""
    if value.dtype == torch.uint8:  # of a rank without rows: no values, but its keys must exist
        blocks = parameter.shape[-1] // (block_size_for(full_shape) or 1)
        return QuantisedParts(codes=value, scales=torch.zeros((*value.shape[:-1], blocks), device=value.device))
    return quantised_parts(value)


def as_shard(tensor: torch.Tensor, shard: LocalShard | None) -> torch.Tensor:
    """A tensor shaped like a sharded parameter as chunks of the full tensor; other tensors unchanged."""
    if shard is None or not shard.is_sharded or tensor.ndim == 0:
        return tensor
    if tensor.shape[-1] != shard.local_shape[-1]:  # scales of 8-bit moments
        shard = shard.with_row_size(tensor.shape[-1])
    return ShardTensor.of(local(tensor), shape=shard.shape, chunks=chunks_of(tensor, shard))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def _logical(
    name: str, value: torch.Tensor, parameter: torch.Tensor, *, full_shape: torch.Size
) -> dict[str, torch.Tensor]:
    """A state tensor as tensors that can be resharded: 8-bit moments become codes and scales, sharded alike."""
    if value.ndim == 0 or isinstance(value, DTensor):
        return {name: value}
    parts = _parts(value, parameter, full_shape=full_shape)
    if parts is None:
        return {name: _placed(value, parameter, parameter.shape)}
    of_scales = torch.Size((*parameter.shape[:-1], parts.scales.shape[-1]))
    return {
        f"{name}{CODES}": _placed(parts.codes, parameter, parameter.shape),
        f"{name}{SCALES}": _placed(parts.scales, parameter, of_scales),
    }


def _placed(own: torch.Tensor, parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """This rank's shard of a tensor of `shape`, with the parameter's placement."""
    if not isinstance(parameter, DTensor):
        return own
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
