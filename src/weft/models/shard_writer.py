"""Writes tensors to numbered safetensors files of bounded size, with at most one file in memory. No names mapped.

Files get their final names (`model-00001-of-00007.safetensors`) in `finish`, when their number is known.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from weft.zoo.hub import INDEX_NAME, SINGLE_NAME


class ShardWriter:
    """`add` every tensor once, then `finish`. A tensor larger than `max_shard_bytes` gets a file of its own."""

    def __init__(self, folder: Path, *, max_shard_bytes: int) -> None:
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._num_shards = 0
        self._total_bytes = 0
        self._total_values = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one CPU tensor; flush the pending ones first if it would exceed the size of a file."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._total_values += tensor.numel()

    def finish(self) -> None:
        """Write the pending tensors, give the files their final names, and write the index if there are several."""
        self._flush()
        for number in range(self._num_shards):
            self._temporary(number).rename(self._folder / self._final_name(number))
        if self._num_shards > 1:
            (self._folder / INDEX_NAME).write_text(self._index(), encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        # transformers refuses files without this metadata
        save_file(self._pending, str(self._temporary(self._num_shards)), metadata={"format": "pt"})
        self._shard_of.update(dict.fromkeys(self._pending, self._num_shards))
        self._num_shards += 1
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self._folder / f"shard-{number}.partial"

    def _final_name(self, number: int) -> str:
        if self._num_shards == 1:
            return SINGLE_NAME
        return f"model-{number + 1:05d}-of-{self._num_shards:05d}.safetensors"

    def _index(self) -> str:
        weight_map = {name: self._final_name(number) for name, number in sorted(self._shard_of.items())}
        metadata = {"total_parameters": self._total_values, "total_size": self._total_bytes}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
