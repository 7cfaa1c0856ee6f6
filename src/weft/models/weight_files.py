"""Safetensors files of one Hugging Face folder: the file of each tensor, and slices of it. No model, no names mapped.

`model.safetensors` wins over `model.safetensors.index.json`, as in transformers. All headers are read at the start
(kilobytes per file), data only in `read`, one open file at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.core.errors import WeightsError
from weft.core.json_files import parse_json_table
from weft.zoo.hub import INDEX_NAME, SINGLE_NAME, require_weights

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # per file, for its digest
_INCOMPLETE = "download or copy the file again; a few-byte file may be a Git LFS pointer"

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Stored:
    """One tensor as a header describes it; `dtype` is the safetensors spelling ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """Stored tensors of a folder by name; a context manager that closes the open file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, Stored] = {}
        self._open_file: Path | None = None
        self._handle: Any = None
        promised = _promised_names(folder)
        for file, names in promised.items():
            self._read_header(file, names)
        self.close()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open file; a later `read` opens it again."""
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._open_file, self._handle = None, None

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        """The stored tensor, or the slice `index` of it, in its own memory."""
        stored = self.stored[name]
        wanted = full_index(stored.shape, index)
        try:
            part = self._open(stored.file).get_slice(name)[wanted if wanted else ...]
        except (SafetensorError, OSError) as error:
            raise _unreadable(stored.file, error) from error
        # The slice is a view of the mapped file: without the copy a file that shrinks raises SIGBUS on access.
        return torch.as_tensor(part).clone(memory_format=torch.contiguous_format)

    def _open(self, file: Path) -> Any:
        if self._open_file != file:
            self.close()
            handle: Any = safe_open(str(file), framework="pt", device="cpu")
            self._open_file, self._handle = file, handle.__enter__()
        return self._handle

    def _read_header(self, file: Path, names: Sequence[str]) -> None:
        if not file.is_file():
            raise WeightsError(f"the weight file {file} is missing", hint="the index names it: copy all the shards")
        try:
            handle = self._open(file)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                part = handle.get_slice(name)
                self.stored[name] = Stored(file, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error
        for name in names:
            if name not in self.stored:
                raise WeightsError(f"the weight file {file} lacks {name!r}, which the index lists", hint=_INCOMPLETE)


def digest_of(folder: Path) -> str:
    """A digest of a folder's weights: names and sizes of the files, and samples of their bytes at even distances.

    Whole files would take minutes; another training of the same model changes nearly every byte."""
    found = hashlib.sha256()
    for file in _promised_names(folder):
        try:
            size = file.stat().st_size
            found.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as data:
                for index in range(_SAMPLES):
                    data.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    found.update(data.read(_SAMPLE_BYTES))
        except OSError as error:
            raise _unreadable(file, error) from error
    return found.hexdigest()[:32]


def full_index(shape: Sequence[int], index: Index | None) -> Index:
    """`index` with explicit bounds, one slice per dimension."""
    given = index or ()
    if len(given) > len(shape):
        raise IndexError(f"{len(given)} slices for a tensor of {len(shape)} dimensions")
    padded = given + (slice(None),) * (len(shape) - len(given))
    return tuple(_full_slice(one, size) for one, size in zip(padded, shape, strict=True))


def _full_slice(one: slice, size: int) -> slice:
    start, stop, step = one.indices(size)
    if step != 1:
        raise IndexError("slices of weights must have step 1")
    return slice(start, max(start, stop))


def _promised_names(folder: Path) -> dict[Path, list[str]]:
    """The files to read, each with the names that the index lists for it."""
    require_weights(folder, name=str(folder))
    if (folder / SINGLE_NAME).is_file():
        return {folder / SINGLE_NAME: []}
    index = folder / INDEX_NAME
    try:
        weight_map = dict(parse_json_table(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"the weight index {index} cannot be read: {error}", hint=_INCOMPLETE) from error
    promised: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        promised.setdefault(folder / str(file), []).append(name)
    if not promised:
        raise WeightsError(f"the weight index {index} names no files", hint=_INCOMPLETE)
    return dict(sorted(promised.items()))


def _unreadable(file: Path, error: Exception) -> WeightsError:
    return WeightsError(f"the weight file {file} is damaged or incomplete: {error}", hint=_INCOMPLETE)
