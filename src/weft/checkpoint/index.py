"""index.json: the place of each chunk of each tensor in the data files. It replaces DCP's `.metadata` for reading.

DCP's `.metadata` is a pickle: opening it runs code. It is still written, so that DCP's own tools can open a checkpoint,
but nothing here reads it. Reading builds DCP's Metadata value from this file instead:

    {"files": [name], "tensors": {key: {"dtype", "shape", "chunks": [[offsets, sizes, file, offset, length]]}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from weft.checkpoint.manifest import Manifest, ManifestError, TensorRecord
from weft.core.json_files import parse_json_table

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class FileSlice:
    """A byte range in a data file, with the field names that DCP's FileSystemReader reads."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_records(metadata: Metadata) -> dict[str, TensorRecord]:
    """Shape and dtype of every global tensor in the save plan of all ranks."""
    return {
        key: TensorRecord(shape=tuple(item.size), dtype=dtype_name(item.properties.dtype))
        for key, item in _tensor_items(metadata)
    }


def render_index(metadata: Metadata, results: Iterable[WriteResult]) -> bytes:
    """The exact bytes of index.json, from the global plan and the write results of all ranks."""
    slices = {result.index: result.storage_data for result in results}
    files = sorted({place.relative_path for place in slices.values()})
    number = {name: position for position, name in enumerate(files)}

    def row(key: str, chunk: ChunkStorageMetadata) -> list[Any]:
        place = slices[MetadataIndex(key, chunk.offsets)]
        return [list(chunk.offsets), list(chunk.sizes), number[place.relative_path], place.offset, place.length]

    tensors = {
        key: {
            "dtype": dtype_name(item.properties.dtype),
            "shape": list(item.size),
            "chunks": [row(key, chunk) for chunk in item.chunks],
        }
        for key, item in _tensor_items(metadata)
    }
    return json.dumps({"files": files, "tensors": tensors}).encode()


def read_index(directory: Path, manifest: Manifest) -> Metadata:
    """DCP's Metadata value of a verified checkpoint, restricted to the files and tensors of its manifest."""
    try:
        fields = parse_json_table((directory / INDEX_NAME).read_bytes())
        return _metadata_from(fields, manifest)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ManifestError(f"{INDEX_NAME} does not fit the manifest ({type(error).__name__}: {error})") from error


def _tensor_items(metadata: Metadata) -> Iterable[tuple[str, TensorStorageMetadata]]:
    for key, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            raise TypeError(f"{key} is not a tensor")
        yield key, item


def _metadata_from(fields: dict[str, Any], manifest: Manifest) -> Metadata:
    files = [str(name) for name in fields["files"]]
    if not set(files) <= set(manifest.files) or set(fields["tensors"]) != set(manifest.tensors):
        raise ValueError("files or tensors differ")
    items: dict[str, Any] = {}
    slices: dict[MetadataIndex, FileSlice] = {}
    for key, entry in fields["tensors"].items():
        chunks = []
        for offsets, sizes, file, offset, length in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            slices[MetadataIndex(key, offsets)] = FileSlice(files[file], int(offset), int(length))
        properties = TensorProperties(dtype=_dtype(manifest.tensors[key].dtype))
        items[key] = TensorStorageMetadata(properties, torch.Size(manifest.tensors[key].shape), chunks)
    return Metadata(items, storage_data=slices, storage_meta=StorageMeta())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
