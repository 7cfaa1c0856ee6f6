"""Fields of a row: what a source takes from each row of JSONL, parquet or a dataset, as one document.

Text is one field. Other formats take a few, as one JSON text with the place of the row (`SampleRow`): documents travel
to encoding processes as text, and an encoder's error must name the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.core.data_spec import DataFormat, DataSpec
from weft.core.errors import DataError
from weft.data.documents import Document, missing_field, require_text

# format -> sets of fields, one of which a row must have; and the fields that it may have
_NEEDED: dict[DataFormat, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",), ("conversations",)),
    "prompt-completion": (("prompt", "completion"),),
    "preference": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
}
_OPTIONAL = ("tools", "system")


class RowFields(Protocol):
    """Makes a document of a row."""

    def identity(self) -> str: ...

    def columns(self, known: Sequence[str], *, where: str) -> list[str]:
        """The columns to read, of those known; an error if one is missing."""
        ...

    def document(self, row: Mapping[str, Any], *, where: str) -> Document: ...


@dataclass(frozen=True)
class TextField:
    """The text of one field."""

    name: str

    def identity(self) -> str:
        return self.name

    def columns(self, known: Sequence[str], *, where: str) -> list[str]:
        if self.name not in known:
            raise missing_field(self.name, where=where, known=list(known))
        return [self.name]

    def document(self, row: Mapping[str, Any], *, where: str) -> Document:
        if self.name not in row:
            raise missing_field(self.name, where=where, known=sorted(row))
        return require_text(row[self.name], text_field=self.name, where=where)


@dataclass(frozen=True)
class SampleFields:
    """The fields of a format, as JSON."""

    format: DataFormat

    def identity(self) -> str:
        return f"format {self.format}"

    def columns(self, known: Sequence[str], *, where: str) -> list[str]:
        found = next((names for names in _NEEDED[self.format] if set(names) <= set(known)), None)
        if found is None:
            wanted = " or ".join(", ".join(names) for names in _NEEDED[self.format])
            raise DataError(
                f"{where}: a row of data.format = {self.format!r} needs the fields {wanted}",
                hint=f"the row has: {', '.join(sorted(known)) or 'no field'}",
            )
        return [*found, *(name for name in _OPTIONAL if name in known)]

    def document(self, row: Mapping[str, Any], *, where: str) -> Document:
        taken = {name: row[name] for name in self.columns(list(row), where=where)}
        return SampleRow(where=where, fields=taken).to_text()


@dataclass(frozen=True)
class SampleRow:
    """One row of a format other than text."""

    where: str  # file and line
    fields: dict[str, Any]

    def to_text(self) -> str:
        return json.dumps([self.where, self.fields], ensure_ascii=False, default=str)

    @staticmethod
    def from_text(text: Document) -> SampleRow:
        where, fields = json.loads(text)
        return SampleRow(where=where, fields=fields)


def fields_of(spec: DataSpec) -> RowFields:
    return TextField(spec.text_field) if spec.format == "text" else SampleFields(spec.format)
