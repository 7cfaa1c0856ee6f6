"""`hf:NAME`: a dataset of the optional `datasets` library: a saved one, a folder it can load, or a hub name.

Rows come from the memory-mapped tables of the library, batch by batch, in table order. Identity: the files of a local
folder, or the table files of a hub name in the cache of the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.core.errors import DataError, first_line
from weft.core.extras import import_extra
from weft.data.documents import Document, file_identity, is_path_like
from weft.data.row_fields import RowFields

ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class DatasetSource:
    """One split of a dataset; loaded at first use, for a local folder only when its rows are read."""

    dataset: str
    split: str
    fields: RowFields

    @property
    def name(self) -> str:
        return f"hf:{self.dataset}"

    def require_folder(self) -> None:
        """Raise if a name that can only be a path does not exist; a hub name is not looked up."""
        _ = self._folder

    def identity(self) -> list[Any]:
        if self._folder:
            files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        else:
            files = [Path(entry["filename"]) for entry in self.rows.cache_files]
        return ["hf", self.dataset, self.split, self.fields.identity(), [file_identity(path) for path in files]]

    def documents(self) -> Iterator[Document]:
        rows = self.rows
        columns = self.fields.columns(list(rows.column_names), where=self.name)
        number = 0
        for batch in rows.select_columns(columns).iter(batch_size=ROWS_AT_ONCE):
            for values in zip(*(batch[name] for name in columns), strict=True):
                number += 1
                yield self.fields.document(dict(zip(columns, values, strict=True)), where=f"{self.name}: row {number}")

    def size_bytes(self) -> int | None:
        """The buffers of the columns that are read; a selection of rows reads less."""
        rows = self.rows
        return int(rows.select_columns(self.fields.columns(list(rows.column_names), where=self.name)).data.nbytes)

    @cached_property
    def _folder(self) -> Path | None:
        folder = Path(self.dataset).expanduser()
        if folder.is_dir():
            return folder.resolve()
        if is_path_like(self.dataset):
            raise DataError(f"there is no dataset folder {self.dataset}", hint="check the path after 'hf:'")
        return None

    @cached_property
    def rows(self) -> Any:
        library = import_extra("datasets")
        try:
            return self._load(library)
        except DataError:
            raise
        except Exception as error:  # the library raises many kinds; all mean "not loadable"
            raise DataError(
                f"the dataset {self.dataset!r} (split {self.split!r}) cannot be loaded: {first_line(error)}",
                hint="check data.source and data.split; a hub name needs the network or a filled cache",
            ) from None

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


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder: a dataset, or a dictionary of splits."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
