"""TOML documents as frozen pydantic values and back, with errors that name the key, the value and the fix.

It is generic: `Plan` and `RunSpec` are declared in their own files. The printed form parses back to the same value.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.core.errors import BadValueError, ConfigFileError, UnknownKeyError
from weft.core.json_files import parse_toml


class Section(BaseModel):
    """A frozen table of a document; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


Kind = TypeVar("Kind", bound=BaseModel)


class Document(Section):
    """A file of tables; its printed form parses back."""

    @classmethod
    def from_tables(cls, tables: dict[str, Any], *, source: str = "run") -> Self:
        return parse(cls, tables, source=source)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        return cls.from_tables(read_toml(Path(path)), source=str(path))

    def to_toml(self) -> str:
        return dump(self)


def sections_of(kind: type[BaseModel]) -> tuple[str, ...]:
    """The names of a document's tables."""
    return tuple(
        name
        for name, field in kind.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigFileError(
            f"there is no file {path}", hint="check the path; `weft train` alone needs no file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {error}", hint="give the path of a TOML text file") from None
    except ValueError as error:
        raise ConfigFileError(
            f"{path} is not TOML: {error}", hint="strings need quotes, tables are [in brackets]"
        ) from None


def parse(kind: type[Kind], tables: Mapping[str, Any], *, source: str) -> Kind:
    """`tables` as a `kind`; the first problem becomes an error of one sentence."""
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
        location = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise unknown_key(kind, location, source=source) from None
        where = ".".join(location) or "the document"
        message = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] == "missing" or not location else f" (given: {first['input']!r})"
        raise BadValueError(f"{source}: {where}: {message}{given}", hint=_hint_for(kind, location)) from None


def dump(document: BaseModel) -> str:
    """The document as TOML, without keys whose value is None, since TOML has no null."""
    return tomli_w.dumps(document.model_dump(mode="json", exclude_none=True))


def apply_settings(tables: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """A copy of `tables` with each `section.key=value` set; values are TOML literals, else plain strings."""
    result = _deep_copy(tables)
    for setting in settings:
        path, separator, text = setting.partition("=")
        keys = path.strip().split(".")
        if not separator or len(keys) < 2 or not all(keys):
            raise BadValueError(f"--set {setting!r} is not section.key=value", hint="for example --set train.steps=50")
        table = result
        for key in keys[:-1]:
            child = table.setdefault(key, {})
            if not isinstance(child, dict):
                raise BadValueError(f"--set {setting!r}: {key} is a value, not a table", hint="set the key itself")
            table = child
        table[keys[-1]] = _parse_literal(text.strip())
    return result


def unknown_key(kind: type[BaseModel], location: list[str], *, source: str) -> UnknownKeyError:
    """The error for a key that does not exist, with the nearest known key of its table."""
    owner = _model_at(kind, location[:-1])
    known = sorted(owner.model_fields) if owner else []
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    place = f"[{'.'.join(location[:-1])}]" if location[:-1] else "the top level"
    return UnknownKeyError(
        f"{source}: unknown key {location[-1]!r} in {place}", hint=f"{hint}known keys: {', '.join(known)}"
    )


def _model_at(kind: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = kind
    for key in location:
        if key.isdecimal():  # a place in a list of tables
            continue
        field = model.model_fields.get(key) if model else None
        annotation = field.annotation if field else None
        kinds = (annotation, *get_args(annotation))
        model = next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return model


def _hint_for(kind: type[BaseModel], location: list[str]) -> str:
    owner = _model_at(kind, location[:-1]) if location else None
    field = owner.model_fields.get(location[-1]) if owner else None
    if field is None:
        return "see docs/reference for the keys and their values"
    table = _model_at(kind, location)
    if table is not None:
        return f"[{'.'.join(location)}] is a table; its keys: {', '.join(table.model_fields)}"
    if field.description or field.is_required():
        return field.description or f"{'.'.join(location)} has no default: give it a value"
    return f"the default is {field.get_default(call_default_factory=True)!r}"


def _parse_literal(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _deep_copy(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
