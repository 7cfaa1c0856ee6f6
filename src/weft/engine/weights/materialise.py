"""Materialises a model from the meta device: each rank allocates and fills only its local shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.core.errors import ModelError
from weft.core.shards import Chunk
from weft.engine.ownership import LocalShards, chunks_of, local
from weft.engine.weights.codes import code_writer
from weft.models.adapter.quantised import codes_by_name
from weft.models.initial import Reader, StoresBuffers, WeightSource
from weft.models.layout import ModelLayout

Write = Callable[[torch.Tensor], None]


def is_on_meta(model: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in model.parameters())


@torch.no_grad()
def materialise(
    model: nn.Module,
    layout: ModelLayout,
    source: WeightSource | None,
    *,
    device: torch.device,
    shards: LocalShards,
    fills: bool = True,
) -> None:
    """Allocate this rank's shards on `device` and fill them from `source`; of a real model only buffers move.

    Without `fills` parameters get their values later, by `fill_parameters`: with masters that do not exist yet."""
    if is_on_meta(model):
        if source is None:
            raise ModelError(
                "the model is on the meta device, and there are no weights to fill it with",
                hint="pass weights=, or a model with values",
            )
        _allocate(model, layout, device)
        if fills:
            fill_parameters(model, layout, source, shards=shards)
        if isinstance(source, StoresBuffers):
            _fill_buffers(model, source, source.buffer_names())
    _move_buffers(model, device)


@torch.no_grad()
def place_real_model(model: nn.Module, *, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """A module with values goes to the device, and rank 0's values to every rank: constructors draw per process."""
    if is_on_meta(model):
        return
    model.to(device)
    if dist.get_world_size(group) > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            wire = tensor.detach().contiguous()  # a transposed or expanded tensor cannot be broadcast
            dist.broadcast(wire, group=group, group_src=0)
            if wire.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(wire)


def _allocate(model: nn.Module, layout: ModelLayout, device: torch.device) -> None:
    if isinstance(model, FSDPModule):
        with _buffers_kept(model):
            model.to_empty(device=device)
        return
    for name in layout.unit_of:
        parameter = model.get_parameter(name)
        real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        replace_parameter(model, layout, name, real)


def replace_parameter(model: nn.Module, layout: ModelLayout, name: str, value: nn.Parameter) -> None:
    """Set a parameter at all its tied names."""
    for alias in (name, *(alias for alias, canonical in layout.ties.items() if canonical == name)):
        owner, _, key = alias.rpartition(".")
        model.get_submodule(owner)._parameters[key] = value


def _into_parameter(parameter: nn.Parameter, write: Write) -> None:
    write(local(parameter.detach()))


@torch.no_grad()
def fill_parameters(
    model: nn.Module,
    layout: ModelLayout,
    source: WeightSource,
    *,
    shards: LocalShards,
    store: Callable[[nn.Parameter, Write], None] = _into_parameter,
) -> None:
    """Fill this rank's shards from `source`; `store` calls a function that writes a tensor of the shard's shape."""
    missing, in_codes = set(layout.unit_of), codes_by_name(model)
    here = {layout.copies.get(name, name): name for name in layout.unit_of}
    for first, read in source.readers(list(here)):
        name = here[first]
        parameter = model.get_parameter(name)
        shard = shards.get(name)
        if name in in_codes:
            store(parameter, code_writer(parameter, shard, read, in_codes[name]))
        else:
            store(parameter, functools.partial(_write, chunks_of(parameter, shard), read))
        missing.discard(name)
    if missing:
        raise ModelError(
            f"{len(missing)} parameters got no value, the first is {min(missing)}", hint="check the weights"
        )


def _write(chunks: Sequence[Chunk], read: Reader, values: torch.Tensor) -> None:
    for chunk in chunks:
        if chunk.num_elements:
            values[chunk.local_index].copy_(read(chunk.global_index))


def _fill_buffers(model: nn.Module, source: WeightSource, names: Sequence[str]) -> None:
    """Fill the buffers on this rank; they are replicated."""
    here = {name: buffer for name, buffer in model.named_buffers() if name in set(names)}
    for name, read in source.readers(list(here)):
        here[name].copy_(read(tuple(slice(0, size) for size in here[name].shape)))


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """`to_empty` would replace the buffers' computed values by uninitialised memory."""
    saved = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    try:
        yield
    finally:
        for module, key, buffer in saved:
            module._buffers[key] = buffer
