"""`PartTensor`: a global tensor with some boxes on this rank, for local shards that are not one range of rows.

It has the shape and dtype of the global tensor and holds the local memory. DCP calls the three methods below: the items
to write, the chunks to read, the memory of one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from weft.core.boxes import Box


class PartTensor(Tensor):
    """`local` is the memory of this rank, `boxes` its places in the global tensor."""

    local: Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def of(local: Tensor, *, shape: Sequence[int], boxes: Sequence[Box]) -> PartTensor:
        made: PartTensor = torch.Tensor._make_wrapper_subclass(  # the public way to a tensor without memory of its own
            PartTensor, tuple(shape), dtype=local.dtype, device=local.device
        )
        made.local = local.detach()
        made.boxes = tuple(box for box in boxes if box.num_elements)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"a PartTensor only stands for its boxes; {func} was called on it")

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=TensorProperties.create_from_tensor(self.local), size=self.size()
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return box_at(self.local, self.boxes, index)


def box_at(local: Tensor, boxes: Sequence[Box], index: MetadataIndex) -> Tensor:
    """The memory, in `local`, of the box at a global offset."""
    for box in boxes:
        if index.offset is None or tuple(index.offset) == box.offsets:
            return local[box.local_index]
    raise KeyError(f"{index.fqn} has no box at {index.offset}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
