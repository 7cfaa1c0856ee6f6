"""Reads pickled files of other programs without running their code: classes that are not torch's become empty ones.

A class of DeepSpeed or Megatron need not be installed, and cannot do anything: its object has attributes only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from weft.core.errors import WeightsError

_BUILTINS = frozenset({"dict", "list", "tuple", "set", "frozenset", "int", "float", "str", "bool", "bytes", "complex"})
_CLASSES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)
_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _Stub:
    """An object of a class that is not read."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Stub:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_builtin = module == "builtins" and name in _BUILTINS
        if (module, name) in _CLASSES or is_dtype or is_builtin:
            return super().find_class(module, name)
        if module in _METADATA_MODULES and "." not in name:  # "os.system" is a path through a module that it imports
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        return _stub(f"{module}.{name}")


def read_dcp_metadata(file: Path) -> Metadata:
    """The metadata of a distributed checkpoint, a subclass of another program's too."""
    try:
        with file.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
        given = {name: getattr(found, name) for name in ("state_dict_metadata", "planner_data", "storage_data")}
    except Exception as error:
        raise WeightsError(f"{file} cannot be read: {type(error).__name__}: {error}", hint=_HINT) from error
    return Metadata(**given, storage_meta=getattr(found, "storage_meta", None))


def load_tensors(file: Path) -> Any:
    """The contents of a file of torch.save; objects that are neither tensors nor containers are empty."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        allowed: list[Any] = [(_stub(name), name) for name in unknown]
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise WeightsError(f"{file} cannot be read: {type(error).__name__}: {error}", hint=_HINT) from error


_HINT = "copy the checkpoint again; it may be incomplete"


def _stub(name: str) -> type[_Stub]:
    return type(name.rpartition(".")[2], (_Stub,), {"__module__": name.rpartition(".")[0]})
