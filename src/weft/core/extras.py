"""Optional libraries: who needs them, which extra installs them, and whether they are here, without importing them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from weft.core.errors import MissingExtraError

_MISSING: dict[str, Callable[[], MissingExtraError]] = {
    "datasets": lambda: MissingExtraError("hf: sources need the datasets library", extra="data"),
    "pyarrow": lambda: MissingExtraError("parquet files need the pyarrow library", extra="data"),
    "torchao": lambda: MissingExtraError(
        "optimizer = 'adamw8bit' needs torchao, which is not installed", extra="lowbit"
    ),
    "numba": lambda: MissingExtraError("parameter servers need numba, which is not installed", extra="server"),
    "ray": lambda: MissingExtraError("the launcher 'ray' needs Ray", extra="ray"),
}


def missing_extra(library: str) -> MissingExtraError:
    return _MISSING[library]()


def require_extra(library: str) -> None:
    """Looks for the library and leaves it where it is: importing one takes seconds, and torch with it."""
    if find_spec(library) is None:
        raise missing_extra(library)
