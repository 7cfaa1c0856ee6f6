"""Reshard the folders of N servers to M servers: every row moves to the server of its bucket. Offline.

All servers must have applied the same units, as they have after the snapshots of a run, at its end, and whenever no
push was in flight. If they have not, and their snapshots agree, the records of the logs beyond these are left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError
from weft.server.arrays import Keys
from weft.server.client import server_of_bucket
from weft.server.durable.snapshot import SnapshotWriter, chain
from weft.server.node.snapshots import restore
from weft.server.node.state import State
from weft.server.table.hashing import bucket_of

_PIECE = 1 << 16


def server_folders(folder: Path) -> list[Path]:
    """`folder/0`, `folder/1`, ...; first undoes a reshard that was interrupted between its two renames."""
    old = folder.with_name(f"{folder.name}.old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    return sorted((path for path in folder.glob("[0-9]*") if path.is_dir()), key=lambda path: int(path.name))


def reshard(folder: Path, num_servers: int) -> None:
    """In place; the old folders are removed when the new ones are complete."""
    sources = server_folders(folder)
    if not sources:
        raise CheckpointError(f"{folder} holds no servers", hint="give the servers/ folder of a run")
    if len(sources) == num_servers:
        return
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with_log, number, head = _agreed(sources)
    head = {**head, "spec": {**head["spec"], "num_servers": num_servers}, "clients": {}}
    writers = [SnapshotWriter(fresh / str(index), number, None) for index in range(num_servers)]
    for source in sources:
        _write_rows(restore(source, with_log=with_log)[0], writers, server_of_bucket(num_servers))
    for writer in writers:
        writer.commit(head)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)


def _agreed(sources: list[Path]) -> tuple[bool, int, dict[str, Any]]:
    """(whether the logs agree, or only the snapshots; the last number; the head); raises if neither agree.

    The number of the new snapshots is above that of every row: replay compares the two.
    """
    for with_log in (True, False):
        if not with_log and not all(map(chain, sources)):
            break
        numbers, heads, num_waiting = [], [], 0
        for source in sources:  # one state in memory at a time
            state, number = restore(source, with_log=with_log)
            numbers.append(number)
            heads.append(state.head())
            num_waiting += len(state.shares)
        if not num_waiting and all(head["units"] == heads[0]["units"] for head in heads):
            return with_log, max(numbers), heads[0]
    raise CheckpointError(
        f"the {len(sources)} servers have not applied the same units, nor do their snapshots agree",
        hint=f"continue the run with {len(sources)} servers until its next snapshot",
    )


def _write_rows(state: State, writers: list[SnapshotWriter], buckets: Keys) -> None:
    for place, table in enumerate(state.tables):
        for start in range(0, table.num_slots, _PIECE):
            for index, part in _parts(table.records(start, start + _PIECE), buckets, len(writers)):
                writers[index].write(f"table-{place}.rows", [part])
        for index, part in _parts(table.candidates(), buckets, len(writers)):
            writers[index].write(f"candidates-{place}.rows", [part])


def _parts(records: NDArray[np.void], buckets: Keys, num_servers: int) -> Iterator[tuple[int, NDArray[np.void]]]:
    servers = buckets[bucket_of(np.ascontiguousarray(records["key"]))]
    for index in range(num_servers):
        yield index, records[servers == index]
