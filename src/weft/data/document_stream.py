"""Documents of sources from any place on, for data that is never read as a whole: where to continue is a small value.

A `Cursor` names a source, a file in it and the place behind the last document: bytes of a text or JSONL file, rows of a
parquet file or of a dataset. Sources come one after the other, in the order of `sources`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import DataError
from weft.core.extras import import_extra
from weft.data.dataset_source import DatasetSource, is_saved_dataset
from weft.data.documents import PARQUET_ROWS, PIECE_BYTES, Document, parse_row
from weft.data.row_fields import RowFields, TextField
from weft.data.sources import FileSource, Source, StdlibSource

Make = Callable[[], Document]


@dataclass(frozen=True)
class Cursor:
    """The place behind a document."""

    source: int = 0
    file: int = 0
    offset: int = 0
    number: int = 0  # lines before it in the file, for errors

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class DocumentStream:
    """The documents of sources, made only when asked for."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._live: dict[int, tuple[int, Iterator[Any]]] = {}  # of datasets that can only be read on: rows passed

    def identity(self) -> list[Any]:
        """As `Source.identity`; a dataset is known by its name, since to look at its files would download them."""
        return [
            ["stream", one.dataset, one.split, one.fields.identity()]
            if isinstance(one, DatasetSource)
            else one.identity()
            for one in self._sources
        ]

    def read(self, cursor: Cursor) -> Iterator[tuple[Make, Cursor]]:
        """The documents behind a cursor, each with the cursor behind it."""
        for index in range(cursor.source, len(self._sources)):
            source, begin = self._sources[index], cursor if index == cursor.source else Cursor(source=index)
            if isinstance(source, DatasetSource):
                yield from self._of_dataset(source, begin)
            elif isinstance(source, FileSource | StdlibSource):
                yield from _of_files(source, begin)

    def window(self, cursor: Cursor, size: int) -> tuple[list[Make], Cursor]:
        """The next documents, up to `size`, and the cursor behind them."""
        found = list(itertools.islice(self.read(cursor), size))
        return [make for make, _ in found], found[-1][1] if found else cursor

    def _of_dataset(self, source: DatasetSource, begin: Cursor) -> Iterator[tuple[Make, Cursor]]:
        passed, rows = self._live.pop(begin.source, (0, iter(())))
        if not 0 < passed <= begin.offset:
            passed, rows = 0, _rows_of(source)
        for row in itertools.islice(rows, begin.offset - passed, None):
            begin = Cursor(source=begin.source, offset=begin.offset + 1)
            self._live[begin.source] = begin.offset, rows
            yield _maker(source.fields, row, f"{source.name}: row {begin.offset}"), begin


def _rows_of(source: DatasetSource) -> Iterator[Any]:
    folder = Path(source.dataset).expanduser()
    if folder.is_dir() and is_saved_dataset(folder):
        return iter(source.rows)
    library = import_extra("datasets")
    try:
        return iter(library.load_dataset(str(source.dataset), split=source.split, streaming=True))
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"the dataset {source.dataset!r} (split {source.split!r}) cannot be streamed: {error}",
            hint="check data.source and data.split; a hub name needs the network",
        ) from None


def _of_files(source: FileSource | StdlibSource, begin: Cursor) -> Iterator[tuple[Make, Cursor]]:
    files = source.files if isinstance(source, FileSource) else tuple(source.list_files())
    fields: RowFields = source.fields if isinstance(source, FileSource) else TextField("text")
    readers = {".jsonl": _of_jsonl, ".parquet": _of_parquet}
    for index in range(begin.file, len(files)):
        at = begin if index == begin.file else Cursor(source=begin.source, file=index)
        try:
            yield from readers.get(files[index].suffix.lower(), _of_text)(files[index], fields, at)
        except OSError as error:
            raise DataError(f"{files[index]} cannot be read: {error.strerror}", hint="check the file") from None


def _of_jsonl(path: Path, fields: RowFields, at: Cursor) -> Iterator[tuple[Make, Cursor]]:
    with path.open("rb") as file:
        file.seek(at.offset)
        offset, number = at.offset, at.number
        for line in file:
            offset, number = offset + len(line), number + 1
            if line.strip():
                yield _line_maker(fields, line, f"{path}:{number}"), Cursor(at.source, at.file, offset, number)


def _of_text(path: Path, fields: RowFields, at: Cursor) -> Iterator[tuple[Make, Cursor]]:
    with path.open("rb") as file:
        file.seek(at.offset)
        offset = at.offset
        while lines := file.readlines(PIECE_BYTES):
            text = b"".join(lines)
            offset += len(text)
            yield _constant(text), Cursor(at.source, at.file, offset)


def _of_parquet(path: Path, fields: RowFields, at: Cursor) -> Iterator[tuple[Make, Cursor]]:
    parquet = import_extra("pyarrow", "pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        columns = fields.columns(list(file.schema_arrow.names), where=str(path))
        number = 0
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if number + size <= at.offset:  # passed, unread
                number += size
                continue
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    if number > at.offset:
                        yield _maker(fields, row, f"{path}: row {number}"), Cursor(at.source, at.file, number)


def _maker(fields: RowFields, row: Any, where: str) -> Make:
    return lambda: fields.document(row, where=where)


def _line_maker(fields: RowFields, line: bytes, where: str) -> Make:
    return lambda: fields.document(parse_row(line, where=where), where=where)


def _constant(text: bytes) -> Make:
    return lambda: text
