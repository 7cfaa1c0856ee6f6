"""Tensors that older checkpoints store with another shape: scales of 8-bit moments as [rows, blocks of a row].

The blocks are the same ones wherever their number is; a view of the live memory with the stored shape takes them.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.checkpoint.manifest import Manifest
from weft.checkpoint.parts import ShardTensor
from weft.core.shards import Chunk

SCALES = ".scales"


def with_stored_shapes(state: dict[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """`state`, with flattened views of those tensors that the checkpoint stores flattened behind dimension 0."""
    return {key: _flattened(tensor) if _is_flat(key, tensor, manifest) else tensor for key, tensor in state.items()}


def _is_flat(key: str, tensor: Tensor, manifest: Manifest) -> bool:
    saved = manifest.tensors.get(key)
    if saved is None or not key.endswith(SCALES) or tensor.ndim < 3:
        return False
    return tuple(saved.shape) == (tensor.shape[0], math.prod(tensor.shape[1:]))


def _flattened(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShardTensor):
        own, chunks = tensor.local, tensor.chunks
    elif isinstance(tensor, DTensor):
        own, [place] = tensor.to_local(), tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # as DCP does
        chunks = (Chunk(offsets=tuple(place.offsets), sizes=tuple(place.sizes), local_offsets=(0,) * tensor.ndim),)
    else:
        return tensor.view(tensor.shape[0], -1)
    shape = (tensor.shape[0], math.prod(tensor.shape[1:]))
    flat = [_flat_chunk(chunk, tensor.shape[2:], own.shape[2:]) for chunk in chunks]
    return ShardTensor.of(own.view(own.shape[0], -1), shape=shape, chunks=flat)


def _flat_chunk(chunk: Chunk, rest: tuple[int, ...], own_rest: tuple[int, ...]) -> Chunk:
    """ZeRO shards dimension 0 or 1, so that a chunk's rows of dimension 1 lie one after the other."""
    if not tuple(chunk.sizes[2:]) == tuple(rest) == tuple(own_rest):
        raise ValueError(f"a chunk of {chunk.sizes} is not whole rows")
    size = math.prod(rest)
    return Chunk(
        offsets=(chunk.offsets[0], chunk.offsets[1] * size),
        sizes=(chunk.sizes[0], chunk.sizes[1] * size),
        local_offsets=(chunk.local_offsets[0], chunk.local_offsets[1] * size),
    )
