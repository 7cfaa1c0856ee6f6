"""Export the tables of a run folder: keys and rows as .npy, dense parameters by name as safetensors.

    <table>.keys.npy   int64 [rows]          model.safetensors   dense parameters of the model
    <table>.rows.npy   float32 [rows, dim]   tables.json         specs and paths of the tables

Written server by server, straight to the files: a table need not fit into memory twice. The run must have ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, RunFolderError
from weft.core.server_spec import ServerRun
from weft.core.table_spec import DENSE_TABLE
from weft.server.job.records import ServerFolder
from weft.server.model.dense import DenseBlocks
from weft.server.model.task import open_task
from weft.server.node.reshard import server_folders
from weft.server.node.snapshots import restore
from weft.server.worker.worker import build_seeded
from weft.train.folder.state import require_free

_PIECE = 1 << 16


def export_tables(run_dir: Path, out: Path) -> dict[str, Any]:
    """Returns the path, number of rows and spec of each table."""
    folder = ServerFolder(run_dir)
    folder.require_run()
    sources = server_folders(folder.servers_path)
    if not sources:
        raise CheckpointError(f"{run_dir} has no servers' folders", hint="was the run ever started?")
    require_free(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tables = _write_tables(sources, out)
        model = _write_model(folder, out) if DENSE_TABLE in tables else None
        written = {"tables": tables, "model": model}
        (out / "tables.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error}", hint="choose another --out") from None
    return written


def _write_tables(sources: Sequence[Path], out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for source in sources:  # the first pass counts: a .npy file starts with its length
        for table in restore(source)[0].tables:
            counts[table.spec.name] = counts.get(table.spec.name, 0) + table.num_rows
            found[table.spec.name] = table.spec.model_dump(mode="json")
    files = {name: _TableFiles(out, name, counts[name], spec["dim"]) for name, spec in found.items()}
    for source in sources:
        for table in restore(source)[0].tables:
            for start in range(0, table.num_slots, _PIECE):
                files[table.spec.name].add(table.records(start, start + _PIECE))
    return {
        name: {"path": str(out / f"{name}.rows.npy"), "rows": counts[name], "spec": spec}
        for name, spec in found.items()
    }


class _TableFiles:
    """The two files of a table, filled from the front."""

    def __init__(self, out: Path, name: str, count: int, dim: int) -> None:
        self._keys = open_memmap(out / f"{name}.keys.npy", "w+", np.int64, (count,))
        self._rows = open_memmap(out / f"{name}.rows.npy", "w+", np.float32, (count, dim))
        self._at = 0

    def add(self, records: NDArray[np.void]) -> None:
        end = self._at + len(records)
        self._keys[self._at : end] = records["key"]
        self._rows[self._at : end] = records["values"]
        self._at = end


def _write_model(folder: ServerFolder, out: Path) -> str:
    from safetensors.torch import save_file

    run = ServerRun.from_file(folder.run_path)
    model = build_seeded(open_task(run, folder.path.absolute()), seed=run.train.seed)
    blocks = DenseBlocks(model)
    keys, rows = (np.load(out / f"{DENSE_TABLE}.{part}.npy") for part in ("keys", "rows"))
    blocks.load(rows[np.argsort(keys)][: len(blocks.keys)])
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, out / "model.safetensors")
    return str(out / "model.safetensors")
