"""Named full tensors of a checkpoint folder, read one at a time: the interface, and torch's distributed checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from weft.core.errors import WeightsError
from weft.models.imports.safe_pickle import read_dcp_metadata

METADATA = ".metadata"
# of optimizers, schedules, loaders and random states, as torchtitan, Megatron-LM, accelerate and torch name them
_NO_WEIGHTS = ("optim", "chained_", "lr_scheduler", "dataloader", "train_state", "rng", "rerun_state", "ft_", "scaler")


class TensorSource(Protocol):
    """`shapes` has every tensor of the model; `read` gives one in full."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor: ...


class DcpSource:
    """The tensors of a folder with `.metadata`, without those of optimizers. It keeps the last one read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = read_dcp_metadata(folder / METADATA)
        tensors = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not is_training_state(name)
        }
        self._dtypes = {name: entry.properties.dtype for name, entry in tensors.items()}
        self.shapes = {name: tuple(entry.size) for name, entry in tensors.items()}
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is read
            value = torch.empty(self.shapes[name], dtype=self._dtypes[name])
            try:
                with warnings.catch_warnings(action="ignore"):  # that it is a single process
                    load({name: value}, storage_reader=_ForeignReader(self._folder, self._metadata), no_dist=True)
            except Exception as error:
                first = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise WeightsError(
                    f"{name!r} of {self._folder} cannot be read: {first}", hint="copy all its .distcp files again"
                ) from error
            self._last = (name, value)
        return self._last[1]


class _ForeignReader(FileSystemReader):
    """DCP's reader with metadata that is read already: unpickling them again would run code of the file."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


def is_training_state(name: str) -> bool:
    """Whether the entry belongs to an optimizer or a loop, not to the model."""
    return name.startswith(_NO_WEIGHTS) or "_extra_state" in name or ".optimizer." in name
