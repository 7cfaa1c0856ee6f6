"""Optional libraries: the feature that needs one, the extra that installs it, and whether it is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from weft.core.errors import MissingExtraError

TRACKERS = ("wandb", "mlflow", "trackio")
NEEDED_FOR = {  # library -> (sentence, extra)
    "datasets": ("hf: sources need the datasets library", "data"),
    "pyarrow": ("parquet files need the pyarrow library", "data"),
    "torchao": ("optimizer = 'adamw8bit' needs torchao, which is not installed", "lowbit"),
    "numba": ("parameter servers need numba, which is not installed", "server"),
    **{name: (f"track.kind = ['{name}'] needs {name}, which is not installed", name) for name in TRACKERS},
    "cloudpickle": ("weft.train with functions of a script or notebook on several ranks needs cloudpickle", "notebook"),
    "ray": ("the launcher 'ray' needs Ray", "ray"),
}


def missing_extra(library: str) -> MissingExtraError:
    sentence, extra = NEEDED_FOR[library]
    return MissingExtraError(sentence, extra=extra)


def import_extra(library: str, module: str = "") -> Any:
    """The library, or a module of it."""
    try:
        return import_module(module or library)
    except ImportError:
        raise missing_extra(library) from None


def require_extra(library: str) -> None:
    """Require the library without importing it: an import takes seconds, and may import torch."""
    if find_spec(library) is None:
        raise missing_extra(library)
