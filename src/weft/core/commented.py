"""A document as TOML in which every key has its meaning above it: the start of an own run.toml or plan.toml.

Comments are the descriptions of the fields, as in docs/reference. The text parses back to the document; a key without a
value is a comment too.
"""

from __future__ import annotations

import textwrap
from typing import Any

import tomli_w
from pydantic import BaseModel

WIDTH = 100


def commented(document: BaseModel, *, opening: str) -> str:
    """`opening`: sentences at the top of the file."""
    lines = [*_comment(opening), "", *_keys(document, "")]
    for name, value in document:
        if isinstance(value, BaseModel):
            lines += _section(value, name)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: BaseModel, path: str) -> list[str]:
    """The table, then the tables inside it."""
    own = type(section).__dict__.get("__doc__")
    lines = ["", *(_comment(" ".join(own.split())) if own else []), f"[{path}]", *_keys(section, path)]
    for name, value in section:
        if isinstance(value, BaseModel):
            lines += _section(value, f"{path}.{name}")
    return lines


def _keys(table: BaseModel, path: str) -> list[str]:
    values = table.model_dump(mode="json", exclude_none=True)
    tables: list[str] = []
    lines: list[str] = []
    for name, field in type(table).model_fields.items():
        if isinstance(getattr(table, name), BaseModel):
            continue
        meaning = _comment(f"{name}: {field.description}")
        value = values.get(name)
        if isinstance(value, dict):  # after the plain keys, which would else belong to it
            tables += ["", *meaning, *_table(f"{path}.{name}".lstrip("."), value)]
        else:
            lines += [*meaning, f"# {name} =" if value is None else _plain(name, value)]
    return lines + tables


def _table(path: str, value: dict[str, Any]) -> list[str]:
    nested: dict[str, Any] = value
    for key in reversed(path.split(".")):
        nested = {key: nested}
    return tomli_w.dumps(nested).rstrip().splitlines() if value else [f"[{path}]"]


def _plain(name: str, value: Any) -> str:
    """On one line: lists of numbers and names are short."""
    text = tomli_w.dumps({name: value}).strip()
    return text if "\n" not in text or "{" in text else " ".join(part.strip() for part in text.splitlines())


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
