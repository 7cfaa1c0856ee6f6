"""A `ModelShape` as JSON and back. Fields with their default are left out."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

from weft.core import model_shape
from weft.core.model_shape import ModelShape


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    return _to_table(shape)


def shape_from_json(table: dict[str, Any]) -> ModelShape:
    shape: ModelShape = _from_table(ModelShape, table)
    return shape


def _to_table(value: Any) -> dict[str, Any]:
    own = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    defaults = {one.name: one.default for one in dataclasses.fields(value)}
    return {name: _to_json(one) for name, one in own.items() if one != defaults[name]}


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _to_table(value)
    return [_to_json(one) for one in value] if isinstance(value, tuple) else value


def _from_table(cls: type, table: dict[str, Any]) -> Any:
    hints = get_type_hints(cls, vars(model_shape))
    return cls(**{name: _from_json(hints[name], value) for name, value in table.items()})


def _from_json(hint: Any, value: Any) -> Any:
    if isinstance(value, list):
        inner = get_args(hint)[0]
        return tuple(_from_json(inner, one) for one in value)
    if isinstance(value, dict):
        cls = next(one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one))
        return _from_table(cls, value)  # type: ignore[arg-type]
    return value
