"""Sources: `data.source` resolved to documents, in an order that depends on the names only.

Not here: reading one file (`documents`), datasets of the Hugging Face library (`dataset_source`), tokens (`store`).
Order: the list as written; inside a folder or a glob, files sorted by their relative path; inside a file, file order.
"""

from __future__ import annotations

import difflib
import glob
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError
from weft.data.dataset_source import DatasetSource
from weft.data.documents import ROW_SUFFIXES, SUFFIXES, Document, file_identity, read_documents, read_text
from weft.data.row_fields import RowFields, fields_of

STDLIB = "python-stdlib"
DATASET_PREFIX = "hf:"

# Tests are partly generated and have odd bytes; installed packages are not the standard library.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Source(Protocol):
    """A source of documents with a cheap check for changes."""

    @property
    def name(self) -> str: ...

    def identity(self) -> list[Any]:
        """JSON values that change when the documents may have changed."""
        ...

    def documents(self) -> Iterator[Document]: ...

    def size_bytes(self) -> int | None:
        """The approximate size of the text, for a progress bar; None if unknown."""
        ...


def open_sources(spec: DataSpec) -> list[Source]:
    """The sources of `data.source`, in order; a missing one is a DataError here, not while reading."""
    names = [spec.source] if isinstance(spec.source, str) else spec.source
    if not names or not all(name.strip() for name in names):
        raise DataError("data.source is empty", hint=f"give '{STDLIB}', a file, a folder, a glob or 'hf:NAME'")
    return [_open_source(name, spec=spec) for name in names]


def iterate_documents(sources: list[Source]) -> Iterator[Document]:
    """Every document of every source, without the empty ones."""
    for source in sources:
        yield from (document for document in source.documents() if document)


def total_bytes(sources: list[Source]) -> int | None:
    sizes = [source.size_bytes() for source in sources]
    return sum(size for size in sizes if size is not None) if None not in sizes else None


def _open_source(name: str, *, spec: DataSpec) -> Source:
    if name == STDLIB:
        if spec.format != "text":
            raise DataError(
                f"data.source = '{STDLIB}' has no rows of data.format = {spec.format!r}",
                hint="set data.source to a file or folder of .jsonl or .parquet, or 'hf:NAME'",
            )
        return StdlibSource(root=Path(sysconfig.get_paths()["stdlib"]))
    if name.startswith(DATASET_PREFIX):
        return DatasetSource(
            dataset=name.removeprefix(DATASET_PREFIX).strip(), split=spec.split, fields=fields_of(spec)
        )
    files = tuple(_find_files(name))
    return FileSource(
        name=name, files=files if spec.format == "text" else _row_files(files, spec), fields=fields_of(spec)
    )


@dataclass(frozen=True)
class FileSource:
    """A file, or the known files of a folder or glob, in sorted order."""

    name: str
    files: tuple[Path, ...]
    fields: RowFields

    def identity(self) -> list[Any]:
        return ["files", self.fields.identity(), [file_identity(path) for path in self.files]]

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            yield from read_documents(path, fields=self.fields)

    def size_bytes(self) -> int | None:
        is_compressed = any(path.suffix.lower() == ".parquet" for path in self.files)
        return None if is_compressed else sum(file_identity(path)[1] for path in self.files)


@dataclass(frozen=True)
class StdlibSource:
    """The standard library of the running interpreter: real text on every machine."""

    root: Path
    name: str = STDLIB

    def identity(self) -> list[Any]:
        entries = []
        for path in self.list_files():
            with suppress(OSError, DataError):
                entries.append(file_identity(path))
        return [STDLIB, entries]

    def documents(self) -> Iterator[Document]:
        for path in self.list_files():
            # An unreadable file of the interpreter is skipped: the rest of the library is enough.
            with suppress(OSError):
                yield from read_text(path)

    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.identity()[1])

    def list_files(self) -> list[Path]:
        files = _walk(self.root, suffixes=frozenset({".py"}), skipped=_NOT_STDLIB)
        if not files:
            raise DataError(
                f"this Python has no standard-library sources in {self.root}",
                hint="set data.source to a file or folder of text",
            )
        return files


def _row_files(files: tuple[Path, ...], spec: DataSpec) -> tuple[Path, ...]:
    """The files, which must all have rows; text files of a folder, such as a README, are passed over."""
    rows = tuple(path for path in files if path.suffix.lower() in ROW_SUFFIXES)
    if not rows:
        raise DataError(
            f"{files[0]} has no rows, which data.format = {spec.format!r} needs",
            hint=f"give files with one of {' '.join(sorted(ROW_SUFFIXES))}, or a dataset as 'hf:NAME'",
        )
    return rows


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _require_some(_walk(path, suffixes=SUFFIXES), name=name)
    if path.exists():
        return [_require_known(path).resolve()]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise DataError(f"there is no file, folder or glob match {name!r}", hint=_hint_for(name))
    known = {file.resolve(): None for match in matches for file in _expand(match)}
    return _require_some(list(known), name=name)


def _expand(match: Path) -> list[Path]:
    """The files of a glob match; folders are searched, and '**' may match a file and also its folder."""
    if match.is_dir():
        return _walk(match, suffixes=SUFFIXES)
    return [match] if match.suffix.lower() in SUFFIXES else []


def _walk(root: Path, *, suffixes: frozenset[str], skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Files below `root` with one of the suffixes, by relative path, without hidden files and folders."""
    real_root = os.path.realpath(root)
    found: list[str] = []
    for folder, folders, files in os.walk(real_root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        names = (name for name in files if not name.startswith(".") and Path(name).suffix.lower() in suffixes)
        found += [os.path.join(folder, name) for name in names]
    found.sort(key=lambda path: path.removeprefix(real_root).replace(os.sep, "/"))
    # Only links among the files: to resolve each of a thousand paths takes a restarted rank a tenth of a second.
    return [Path(os.path.realpath(path) if os.path.islink(path) else path) for path in found]


def _require_known(path: Path) -> Path:
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} has an unknown suffix ({path.suffix or 'none'})", hint=_kinds())
    return path


def _require_some(files: list[Path], *, name: str) -> list[Path]:
    if not files:
        raise DataError(f"{name!r} has no file with a known suffix", hint=_kinds())
    return files


def _kinds() -> str:
    return f"known suffixes are {' '.join(sorted(SUFFIXES))}"


def _hint_for(name: str) -> str:
    if difflib.get_close_matches(name, [STDLIB], cutoff=0.7):
        return f"did you mean '{STDLIB}'?"
    return "check the path; a dataset of the datasets library is written 'hf:NAME'"
