"""`ShardTensor`: a global tensor with some chunks on this rank, for local shards that are not one range of rows.

It has the shape and dtype of the global tensor and holds the local memory. DCP calls the three methods below: the items
to write, the chunks to read, the memory of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from weft.core.shards import Chunk

OF_ONE_RANK = "rank."  # prefix of tensors that only a rank of the same layout continues from


class ShardTensor(Tensor):
    """`local`: this rank's memory; `chunks`: its positions in the global tensor; `release`: called after a save has
    read it, for memory that is a file's and is only read in for the save."""

    local: Tensor
    chunks: tuple[Chunk, ...]
    release: Callable[[], None] | None

    @staticmethod
    def of(
        local: Tensor, *, shape: Sequence[int], chunks: Sequence[Chunk], release: Callable[[], None] | None = None
    ) -> ShardTensor:
        made: ShardTensor = torch.Tensor._make_wrapper_subclass(  # the public way to a tensor without its own memory
            ShardTensor, tuple(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.release = local.detach(), release
        made.chunks = tuple(chunk for chunk in chunks if chunk.num_elements)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"a ShardTensor is only for checkpoints; {func} was called on it")

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(chunk), properties=TensorProperties.create_from_tensor(self.local), size=self.size()
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(chunk) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return chunk_at(self.local, self.chunks, index)


def chunk_at(local: Tensor, chunks: Sequence[Chunk], index: MetadataIndex) -> Tensor:
    """The memory, in `local`, of the chunk at a global offset."""
    for chunk in chunks:
        if index.offset is None or tuple(index.offset) == chunk.offsets:
            return local[chunk.local_index]
    raise KeyError(f"{index.fqn} has no chunk at {index.offset}")


def _chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
