"""The folders of N servers become those of M: every row goes where its key's bucket lies then. Offline.

All servers must have applied the same units, which they have after a run's own snapshots, at its end, and whenever
nothing was under way. Where they have not, and their snapshots agree, what the logs hold beyond those is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError
from weft.server.client import server_of_bucket
from weft.server.durable.snapshot import SnapshotWriter, chain
from weft.server.node.restore import restore
from weft.server.node.spec import NodeSpec
from weft.server.node.state import State
from weft.server.table.hashing import bucket_of

_PIECE = 1 << 16


def server_folders(folder: Path) -> list[Path]:
    """`folder/0`, `folder/1`, ...; a reshard that was cut short between its two moves is taken back first."""
    old = folder.with_name(f"{folder.name}.old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    return sorted((path for path in folder.glob("[0-9]*") if path.is_dir()), key=lambda path: int(path.name))


def reshard(folder: Path, num_servers: int) -> None:
    """In place; the old folders go when the new ones are whole."""
    sources = server_folders(folder)
    if not sources:
        raise CheckpointError(f"{folder} holds no servers", hint="give the servers/ folder of a run")
    if len(sources) == num_servers:
        return
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with_log = _agreed(sources)
    number, head = _summary(sources, num_servers, with_log=with_log)
    writers = [SnapshotWriter(fresh / str(index), number, None) for index in range(num_servers)]
    for source in sources:
        _deal(_restored(source, with_log=with_log)[0], writers, server_of_bucket(num_servers))
    for writer in writers:
        writer.commit(head)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)


def _restored(source: Path, *, with_log: bool) -> tuple[State, int]:
    return restore(source, NodeSpec(), with_log=with_log)


def _agreed(sources: list[Path]) -> bool:
    """Whether the logs may be taken too; raises where not even the snapshots agree."""
    for with_log in (True, False):
        if not with_log and not all(map(chain, sources)):
            break
        states = (_restored(source, with_log=with_log)[0] for source in sources)
        told = [(state.units.as_dict(), len(state.shares)) for state in states]
        if all(each == told[0] for each in told) and not told[0][1]:
            return with_log
    raise CheckpointError(
        f"the {len(sources)} servers have not applied the same units, nor do their snapshots agree",
        hint=f"let the run go on with {len(sources)} servers until its next snapshot",
    )


def _summary(sources: list[Path], num_servers: int, *, with_log: bool) -> tuple[int, dict[str, Any]]:
    """The head of the new snapshots. Their number is above every row's: replay compares the two."""
    numbers, heads = [], []
    for source in sources:
        state, number = _restored(source, with_log=with_log)
        numbers.append(number)
        heads.append(state.head())
    head = heads[0]
    return max(numbers), {**head, "spec": {**head["spec"], "num_servers": num_servers}, "clients": {}}


def _deal(state: State, writers: list[SnapshotWriter], buckets: NDArray[np.int64]) -> None:
    for place, table in enumerate(state.tables):
        for start in range(0, table.num_slots, _PIECE):
            for index, part in _parts(table.records(start, start + _PIECE), buckets, len(writers)):
                writers[index].write(f"table-{place}.rows", [part])
        for index, part in _parts(table.candidates(), buckets, len(writers)):
            writers[index].write(f"candidates-{place}.rows", [part])


def _parts(
    records: NDArray[np.void], buckets: NDArray[np.int64], num_servers: int
) -> Iterator[tuple[int, NDArray[np.void]]]:
    servers = buckets[bucket_of(np.ascontiguousarray(records["key"]))]
    for index in range(num_servers):
        yield index, records[servers == index]
