"""Optional libraries: who needs them, which extra installs them, and whether they are here, without importing them."""

from __future__ import annotations

from importlib.util import find_spec

from weft.core.errors import MissingExtraError

_NEEDS = {
    "datasets": ("hf: sources need the datasets library", "data"),
    "pyarrow": ("parquet files need the pyarrow library", "data"),
    "torchao": ("optimizer = 'adamw8bit' needs torchao, which is not installed", "lowbit"),
    "numba": ("parameter servers need numba, which is not installed", "server"),
    "ray": ("the launcher 'ray' needs Ray", "ray"),
}


def missing_extra(library: str) -> MissingExtraError:
    message, extra = _NEEDS[library]
    return MissingExtraError(message, extra=extra)


def require_extra(library: str) -> None:
    """Looks for the library and leaves it where it is: importing one takes seconds, and torch with it."""
    if find_spec(library) is None:
        raise missing_extra(library)
