"""Takes snapshots of a server while it works: rows in small copies under the lock, files outside of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.server.durable.log import Log
from weft.server.durable.snapshot import SnapshotWriter, chain, drop_older
from weft.server.node.restore import share_pieces
from weft.server.node.state import State
from weft.server.table.table import Table

COPY_BYTES = 4 << 20  # under the lock at a time: a pause of about half a millisecond


@dataclass
class Snapshots:
    folder: Path
    state: State
    log: Log | None
    lock: Any  # the server's
    last: Callable[[], int]  # the number of the last change
    settle: Callable[[], None]  # raises where memory lacks what the log has: that log must not go
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    _last: int | None = None  # the number of the last one, of this process; an incremental one adds to it

    def take(self, *, incremental: bool) -> int:
        """Returns its number when it is committed. Without a former one of this process it is whole."""
        with self._one_at_a_time:
            base, self._last = (self._last if incremental else None), None  # after a failure the next one is whole
            with self.lock:
                self.settle()
                number = self.last()
                head, shares = self.state.head(), share_pieces(self.state)
                candidates = [table.candidates() for table in self.state.tables]
                deleted, self.state.deleted = self.state.deleted, {}
            if base == number:
                self._last = number
                return number
            writer = SnapshotWriter(self.folder, number, base)
            for place, table in enumerate(self.state.tables[: len(candidates)]):
                writer.write(f"table-{place}.rows", self._rows(table, since=base + 1 if base is not None else None))
                writer.write(f"candidates-{place}.rows", [candidates[place]])
                writer.write(f"table-{place}.deleted", deleted.get(place, []) if base is not None else [])
            writer.write("shares.bin", shares)
            writer.commit(head)
            self._last = number
            drop_older(self.folder, keep=chain(self.folder))
            if self.log is not None:
                with self.lock:
                    self.log.retire(before=number + 1)
            return number

    def _rows(self, table: Table, *, since: int | None) -> Iterator[NDArray[np.void]]:
        step = max(1, COPY_BYTES // table.record_bytes)
        for start in range(0, table.num_slots, step):
            with self.lock:
                records = table.records(start, start + step, since=since)
            yield records
