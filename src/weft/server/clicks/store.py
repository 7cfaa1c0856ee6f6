"""A click log from files as three flat arrays on disk, which workers map into memory and read by number.

The driver writes them once, into the run folder; workers on other machines need that folder shared.

    keys.bin int64 [n, categorical]   numeric.bin float32 [n, numeric]   labels.bin float32 [n]   store.json
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import DataError, RunFolderError
from weft.core.json_files import parse_json_table
from weft.server.clicks.files import read_file
from weft.server.clicks.samples import ClickBatch

_ARRAYS = ("keys", "numeric", "labels")


class StoredClicks:
    """The log; the arrays stay on disk until they are read."""

    def __init__(self, folder: Path) -> None:
        about = _read_about(folder)
        if about is None:
            raise DataError(f"{folder} holds no samples", hint="workers need the run folder: share it between machines")
        self.num_samples: int = about["samples"]
        self._keys = _map(folder / "keys.bin", np.dtype(np.int64), (self.num_samples, about["categorical"]))
        self._numeric = _map(folder / "numeric.bin", np.dtype(np.float32), (self.num_samples, about["numeric"]))
        self._labels = _map(folder / "labels.bin", np.dtype(np.float32), (self.num_samples,))

    def read(self, indices: NDArray[np.int64]) -> ClickBatch:
        return ClickBatch(
            keys=np.array(self._keys[indices]),
            numeric=np.array(self._numeric[indices]),
            labels=np.array(self._labels[indices]),
        )


def store_files(paths: list[Path], folder: Path, *, numeric: int, categorical: int) -> None:
    """Reads the files into the folder, unless it holds them already."""
    identity = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else [] for path in paths]
    wanted: dict[str, Any] = {"files": identity, "numeric": numeric, "categorical": categorical}
    about = _read_about(folder)
    if about is not None and all(about.get(name) == value for name, value in wanted.items()):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        num_samples = _write_arrays(paths, folder, numeric=numeric, categorical=categorical)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error}", hint="choose another --out") from None
    if num_samples == 0:
        raise DataError(f"{', '.join(map(str, paths))}: no samples", hint="give files with at least two lines")
    # Last, so that an incomplete store is not used after a crash.
    (folder / "store.json").write_text(json.dumps({**wanted, "samples": num_samples}), encoding="utf-8")


def _write_arrays(paths: list[Path], folder: Path, *, numeric: int, categorical: int) -> int:
    num_samples = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in _ARRAYS}
        for path in paths:
            for batch in read_file(path, numeric=numeric, categorical=categorical):
                for name, file in files.items():
                    file.write(np.ascontiguousarray(getattr(batch, name)).tobytes())
                num_samples += len(batch)
    return num_samples


def _map(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if 0 in shape:  # nothing to map: no numeric fields
        return np.zeros(shape, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _read_about(folder: Path) -> dict[str, Any] | None:
    try:
        return parse_json_table((folder / "store.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
