"""`hf:NAME`: a dataset of the optional `datasets` library - a saved one, a folder it can load, or a hub name.

It is not a copy of that library: rows come from its memory-mapped tables, batch by batch, in table order.
Identity: for a local folder the files in it, for a hub name the table files in the library's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.core.errors import DataError
from weft.core.extras import missing_extra
from weft.data.documents import Document, is_path_like, missing_field, require_text

ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class DatasetSource:
    """One split of a dataset; loaded on first need, and for a local folder only when its rows are read."""

    dataset: str
    split: str
    text_field: str

    @property
    def name(self) -> str:
        return f"hf:{self.dataset}"

    def require_folder(self) -> None:
        """A name that can only be a path leads somewhere; a hub name is not looked up."""
        _ = self._folder

    def identity(self) -> list[Any]:
        files = self._local_files() if self._folder else self._table_files()
        return ["hf", self.dataset, self.split, self.text_field, [_file_identity(path) for path in files]]

    def documents(self) -> Iterator[Document]:
        rows = self._rows
        known = list(rows.column_names)
        if self.text_field not in known:
            raise missing_field(self.text_field, where=self.name, known=known)
        number = 0
        for batch in rows.select_columns([self.text_field]).iter(batch_size=ROWS_AT_ONCE):
            for value in batch[self.text_field]:
                number += 1
                yield require_text(value, text_field=self.text_field, where=f"{self.name}: row {number}")

    def size_bytes(self) -> int | None:
        """Of the text column's buffers; a selection of rows reads less."""
        rows = self._rows
        return int(rows.select_columns([self.text_field]).data.nbytes) if self.text_field in rows.column_names else None

    @cached_property
    def _folder(self) -> Path | None:
        folder = Path(self.dataset).expanduser()
        if folder.is_dir():
            return folder.resolve()
        if is_path_like(self.dataset):
            raise DataError(f"there is no dataset folder {self.dataset}", hint="check the path after 'hf:'")
        return None

    @cached_property
    def _rows(self) -> Any:
        library = _import_datasets()
        try:
            loaded = self._load(library)
        except DataError:
            raise
        except Exception as error:  # the library raises many kinds; each means "not loadable", in its first line
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"the dataset {self.dataset!r} (split {self.split!r}) cannot be loaded: {reason}",
                hint="check data.source and data.split; a hub name needs the network or a filled cache",
            ) from None
        return loaded

    def _load(self, library: Any) -> Any:
        folder = self._folder
        if folder is None or not is_saved_dataset(folder):
            return library.load_dataset(str(folder or self.dataset), split=self.split, keep_in_memory=False)
        saved = library.load_from_disk(str(folder), keep_in_memory=False)
        if not isinstance(saved, library.DatasetDict):
            return saved
        if self.split not in saved:
            raise DataError(
                f"{self.name} has no split {self.split!r}", hint=f"set data.split to one of: {', '.join(sorted(saved))}"
            )
        return saved[self.split]

    def _local_files(self) -> list[Path]:
        return sorted(path for path in Path(self._folder or "").rglob("*") if path.is_file())

    def _table_files(self) -> list[Path]:
        return [Path(entry["filename"]) for entry in self._rows.cache_files]


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder: a dataset, or a dictionary of splits."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _file_identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_extra("datasets") from None
    return datasets
