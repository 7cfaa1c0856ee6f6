"""JSON and TOML from files and sockets; any problem of a text is a `ValueError`.

`json.loads` and `tomllib.loads` also raise RecursionError, for brackets nested a thousand deep; with less nesting a
copy or a printed form would raise it later. So depth is bounded here, and readers use these functions.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigFileError

MOST_NESTED = 100  # a real config or manifest has fewer than ten levels
TOO_DEEP = f"nested more than {MOST_NESTED} levels deep"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError if it is invalid, not UTF-8, or nested too deep."""
    try:
        # a byte-order mark is allowed in bytes, but json rejects it in text
        value = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    require_shallow(value)
    return value


def parse_json_table(text: str | bytes) -> dict[str, Any]:
    """The object of a JSON text; ValueError as in `parse_json`, and for any other value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, not a {type(value).__name__}")
    return value


def read_json_table(path: Path, *, hint: str = "give a Hugging Face config.json") -> dict[str, Any]:
    """The JSON object of a file that a user named; any problem raises a ConfigFileError."""
    try:
        return parse_json_table(path.read_bytes())
    except FileNotFoundError:
        raise ConfigFileError(f"there is no file {path}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise ConfigFileError(f"{path} is not a readable JSON file: {error}", hint=hint) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError if it is invalid or nested too deep."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    require_shallow(tables)
    return tables


def require_shallow(value: Any) -> None:
    """Raise ValueError for tables and lists that are nested too deep to be copied or printed."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def _inside(value: Any) -> Iterable[Any]:
    """The containers directly inside a container."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, dict | list)]
