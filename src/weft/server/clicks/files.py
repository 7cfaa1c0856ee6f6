"""Click logs in files: CSV, TSV or parquet in the Criteo layout, read in chunks of samples.

    without a header   label, numeric fields, categorical fields, in that order, tab- or comma-separated
    with a header      the columns label, I1 .. In, C1 .. Cm, in any order; others are ignored

A file is read once, from front to end, into the arrays of store.py. An empty field is missing: 0 where it is numeric,
a value of its own where it is categorical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import DataError, first_line
from weft.core.extras import import_extra
from weft.server.clicks.samples import ClickBatch, field_keys, log_scale, text_values

LABEL = "label"
CHUNK_SAMPLES = 65_536
_HINT = "a line is: label, numeric fields, categorical fields; data.numeric and data.categorical say how many"


@dataclass(frozen=True, kw_only=True)
class ColumnPlaces:
    """Places of the columns in a line."""

    label: int
    numeric: tuple[int, ...]
    categorical: tuple[int, ...]
    width: int | None = None  # None: at least as many as are named


def column_names(*, numeric: int, categorical: int) -> list[str]:
    return [LABEL, *(f"I{j}" for j in range(1, numeric + 1)), *(f"C{j}" for j in range(1, categorical + 1))]


def plain_columns(*, numeric: int, categorical: int) -> ColumnPlaces:
    """The places in a file without a header."""
    return ColumnPlaces(
        label=0,
        numeric=tuple(range(1, 1 + numeric)),
        categorical=tuple(range(1 + numeric, 1 + numeric + categorical)),
        width=1 + numeric + categorical,
    )


def named_columns(header: list[str], *, numeric: int, categorical: int, path: Path) -> ColumnPlaces:
    """The places in a file with a header."""
    names = column_names(numeric=numeric, categorical=categorical)
    missing = [name for name in names if name not in header]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}",
            hint=f"data.numeric = {numeric} and data.categorical = {categorical} ask for {LABEL}, I1.., C1..",
        )
    places = [header.index(name) for name in names]
    return ColumnPlaces(
        label=places[0], numeric=tuple(places[1 : 1 + numeric]), categorical=tuple(places[1 + numeric :])
    )


def read_file(path: Path, *, numeric: int, categorical: int) -> Iterator[ClickBatch]:
    """The file's samples in order."""
    if not path.is_file():
        raise DataError(f"there is no file {path}", hint="data.source is 'clicks' or paths of CSV, TSV, parquet files")
    if path.suffix == ".parquet":
        yield from _read_parquet(path, numeric=numeric, categorical=categorical)
    else:
        yield from _read_text(path, numeric=numeric, categorical=categorical)


def _read_text(path: Path, *, numeric: int, categorical: int) -> Iterator[ClickBatch]:
    with path.open("rb") as file:
        first = file.readline()
        separator = b"\t" if b"\t" in first else b","
        header = first.decode("utf-8", errors="replace").rstrip("\r\n").split(separator.decode())
        names, line_number = [name.strip() for name in header], 1
        if LABEL in names:
            columns = named_columns(names, numeric=numeric, categorical=categorical, path=path)
            line_number = 2
        else:
            columns = plain_columns(numeric=numeric, categorical=categorical)
            file.seek(0)
        while lines := list(islice(file, CHUNK_SAMPLES)):
            rows = [line.rstrip(b"\r\n").split(separator) for line in lines]
            yield _batch_of_rows(rows, columns, path=path, line_number=line_number)
            line_number += len(lines)


def _batch_of_rows(rows: list[list[bytes]], columns: ColumnPlaces, *, path: Path, line_number: int) -> ClickBatch:
    _require_widths(rows, columns, path=path, line_number=line_number)
    labels = _numbers([row[columns.label] for row in rows], path=path, line_number=line_number, name="label")
    numeric = np.empty((len(rows), len(columns.numeric)), dtype=np.float32)
    for j, place in enumerate(columns.numeric):
        texts = [row[place] for row in rows]
        numeric[:, j] = _numbers(texts, path=path, line_number=line_number, name=f"I{j + 1}")
    values = np.empty((len(rows), len(columns.categorical)), dtype=np.uint64)
    for j, place in enumerate(columns.categorical):
        values[:, j] = text_values([row[place] for row in rows])
    return _batch(labels, numeric, values, path=path, line_number=line_number)


def _batch(
    labels: NDArray[np.float32],
    numeric: NDArray[np.float32],
    values: NDArray[np.uint64],
    *,
    path: Path,
    line_number: int,
) -> ClickBatch:
    wrong = np.flatnonzero((labels != 0) & (labels != 1))
    if wrong.size:
        raise DataError(f"{path}, line {line_number + wrong[0]}: the label is not 0 or 1", hint=_HINT)
    return ClickBatch(keys=field_keys(values), numeric=log_scale(numeric), labels=labels)


def _require_widths(rows: list[list[bytes]], columns: ColumnPlaces, *, path: Path, line_number: int) -> None:
    least = 1 + max(columns.label, *columns.numeric, *columns.categorical)
    for place, row in enumerate(rows):
        if len(row) < least or (columns.width is not None and len(row) != columns.width):
            raise DataError(
                f"{path}, line {line_number + place} has {len(row)} fields and not {columns.width or least}", hint=_HINT
            )


def _numbers(texts: list[bytes], *, path: Path, line_number: int, name: str) -> NDArray[np.float32]:
    try:
        return np.array([float(text) if text else np.nan for text in texts], dtype=np.float32)
    except ValueError:
        place = next(place for place, text in enumerate(texts) if not _is_number(text))
        raise DataError(
            f"{path}, line {line_number + place}: {name} is {texts[place].decode(errors='replace')!r}, not a number",
            hint=_HINT,
        ) from None


def _is_number(text: bytes) -> bool:
    try:
        float(text or b"0")
    except ValueError:
        return False
    return True


def _read_parquet(path: Path, *, numeric: int, categorical: int) -> Iterator[ClickBatch]:
    parquet = import_extra("pyarrow", "pyarrow.parquet")
    names = column_names(numeric=numeric, categorical=categorical)
    try:
        file = parquet.ParquetFile(path)
        named_columns(file.schema_arrow.names, numeric=numeric, categorical=categorical, path=path)
        row = 1
        for chunk in file.iter_batches(batch_size=CHUNK_SAMPLES, columns=names):
            yield _batch_of_chunk(chunk, names, numeric=numeric, path=path, row=row)
            row += chunk.num_rows
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path} cannot be read as parquet: {first_line(error)}", hint=_HINT) from None


def _batch_of_chunk(chunk: Any, names: list[str], *, numeric: int, path: Path, row: int) -> ClickBatch:
    def floats(name: str) -> NDArray[np.float32]:
        column = chunk.column(name).to_numpy(zero_copy_only=False)
        return np.array([np.nan if value is None else value for value in column], dtype=np.float32)

    counts = [floats(name) for name in names[1 : 1 + numeric]]
    columns = [
        text_values([_as_bytes(value) for value in chunk.column(name).to_pylist()]) for name in names[1 + numeric :]
    ]
    stacked = np.stack(counts, axis=1) if counts else np.empty((chunk.num_rows, 0), dtype=np.float32)
    return _batch(floats(names[0]), stacked, np.stack(columns, axis=1), path=path, line_number=row)


def _as_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value if isinstance(value, bytes) else str(value).encode()
