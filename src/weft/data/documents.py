"""Streams the documents of one file, by its suffix, in file order. `sources` chooses the files.

A document is `bytes` (text files, exactly as on disk) or `str` (rows of JSONL and parquet).
Text files: one document per file; a file of more than a MiB becomes several, split at line ends.
Row files: one document per row, made of its fields by `row_fields`; a missing field is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.core.errors import DataError, first_line
from weft.core.extras import import_extra
from weft.core.json_files import parse_json

Document = str | bytes

TEXT_SUFFIXES = frozenset({".txt", ".md", ".py"})
ROW_SUFFIXES = frozenset({".jsonl", ".parquet"})
SUFFIXES = TEXT_SUFFIXES | ROW_SUFFIXES

# One huge text file must not become one huge document: tokenizers need many times a document's size in memory.
PIECE_BYTES = 1 << 20
PARQUET_ROWS = 1024


class Fields(Protocol):
    """What `read_documents` needs of `row_fields.RowFields`."""

    def columns(self, known: Sequence[str], *, where: str) -> list[str]: ...

    def document(self, row: Mapping[str, Any], *, where: str) -> Document: ...


def read_documents(path: Path, *, fields: Fields) -> Iterator[Document]:
    """The documents of a file with one of `SUFFIXES`."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            yield from _read_jsonl(path, fields=fields)
        elif suffix == ".parquet":
            yield from _read_parquet(path, fields=fields)
        else:
            yield from read_text(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be read: {reason}", hint="check the file and its permissions") from None


def read_text(path: Path) -> Iterator[bytes]:
    """A text file in chunks of about a MiB, split after a newline, so never inside a UTF-8 character."""
    with path.open("rb") as file:
        while lines := file.readlines(PIECE_BYTES):
            yield b"".join(lines)


def file_identity(path: Path) -> list[Any]:
    """A value that changes when the content of the file may have changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint="check the file or link") from None
    return [str(path), status.st_size, status.st_mtime_ns]


def is_path_like(name: str) -> bool:
    """Whether a missing name can only be a path; a request to the hub for it would take long and fail."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def require_text(value: Any, *, text_field: str, where: str) -> Document:
    """A row's field as a document; null is empty, any other value that is not text is an error."""
    if value is None:
        return ""
    if isinstance(value, str | bytes):
        return value
    raise DataError(
        f"{where}: field {text_field!r} is {type(value).__name__}, not text",
        hint="data.text_field names the field that holds the text",
    )


def missing_field(text_field: str, *, where: str, known: list[str]) -> DataError:
    """The error for rows that lack the text field; it lists the fields they do have."""
    return DataError(
        f"{where}: there is no field {text_field!r}",
        hint=f"set data.text_field to one of: {', '.join(known) or 'none, the row is empty'}",
    )


def _read_jsonl(path: Path, *, fields: Fields) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield fields.document(parse_row(line, where=where), where=where)


def parse_row(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise DataError(f"{where} is not JSON: {error}", hint="a .jsonl file has one JSON object per line") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{where} is a JSON {type(row).__name__}, not an object", hint="a .jsonl file has one JSON object per line"
        )
    return row


def _read_parquet(path: Path, *, fields: Fields) -> Iterator[Document]:
    pyarrow, parquet = import_extra("pyarrow"), import_extra("pyarrow", "pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            columns = fields.columns(list(file.schema_arrow.names), where=str(path))
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield fields.document(row, where=f"{path}: row {number}")
    except pyarrow.ArrowInvalid as error:
        reason = first_line(error)
        raise DataError(f"{path} is not a readable parquet file: {reason}", hint="write the file again") from None
