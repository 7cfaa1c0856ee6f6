"""`Table`: rows of one `TableSpec`, found by int64 keys. Not thread-safe: its owner has a lock; kernels drop the GIL.

A pull makes nothing: an absent key reads its initial value. A push makes the row of a key that is admitted: on its
`admit_after`-th push, whose gradient is applied; the gradients before it are dropped, and only counted.
A change happens to all keys or, where the table is full, to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import TableError
from weft.core.table_spec import Eviction, TableSpec
from weft.server.arrays import Keys, Rows
from weft.server.table import eviction as evicting
from weft.server.table.compiled import kernel_array
from weft.server.table.record import (
    ADD,
    CANDIDATE,
    FTRL,
    LAST_SEEN,
    META_DTYPE,
    OPTIMIZERS,
    VALUES,
    Update,
    build_layout,
    record_dtype,
)
from weft.server.table.rows import delete_rows, new_scratch, pull_rows
from weft.server.table.store import Records
from weft.server.table.updates import hold_values


class Table:
    def __init__(self, spec: TableSpec, *, folder: Path | None = None, reserve_rows: int | None = None) -> None:
        if spec.tier == "mapped" and folder is None:
            raise TableError(f"table {spec.name}: tier mapped needs a folder")
        self.spec = spec
        self._rule = OPTIMIZERS[spec.optimizer.kind]
        self._constants = self._rule.constant_values(spec.optimizer)
        self._dtype = record_dtype(spec)
        self._records = Records(
            build_layout(spec), reserve=reserve_rows, folder=folder if spec.tier == "mapped" else None
        )
        self._candidates = Records(CANDIDATE, reserve=1 if spec.admit_after == 1 else None)

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return self._records.num_rows

    @property
    def num_slots(self) -> int:
        """Slots ever used: records lie in [0, num_slots), with holes where rows were deleted."""
        return self._records.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes in use: records, index, candidates."""
        return self._records.nbytes + self._candidates.nbytes

    @property
    def record_bytes(self) -> int:
        return self._dtype.itemsize

    def pull(self, keys: Keys, out: Rows) -> None:
        """Write the values of each key, or its initial values, to its row of `out`."""
        keys = self._keys(keys)
        if out.shape != (keys.size, self.spec.dim) or out.dtype != np.float32 or not out.flags.carray:
            raise TableError(f"table {self.spec.name}: pull needs float32[{keys.size}, {self.spec.dim}], C-contiguous")
        pull_rows(self._records.store, self._records.layout, keys, out, new_scratch())

    def push(
        self, keys: Keys, gradients: Rows, *, lr_scale: float = 1.0, gradient_scale: float = 1.0, clock: int = 0
    ) -> None:
        """w = optimizer(w, g * gradient_scale, learning_rate * lr_scale). Equal keys are applied one after another."""
        if (
            self._rule.kernel == FTRL
        ):  # its state holds the rate: scaling the rate would shrink the row, so the gradient is scaled
            lr_scale, gradient_scale = 1.0, gradient_scale * lr_scale
        lr = float(self.spec.optimizer.learning_rate * lr_scale)
        update = Update(
            self._rule.kernel, lr, float(gradient_scale), clock, visits=1, admit_after=self.spec.admit_after
        )
        self._change(keys, gradients, np.empty(0, dtype=np.int64), update)

    def add(self, keys: Keys, deltas: Rows, *, clock: int = 0) -> None:
        """w += delta, for every key: admission does not apply."""
        slots = np.empty(keys.size, dtype=np.int64)
        self._change(keys, deltas, slots, Update(ADD, lr=0.0, scale=1.0, clock=clock, visits=1, admit_after=1))
        self._forget(keys)
        self._hold(slots)

    def assign(self, keys: Keys, values: Rows, *, only_absent: bool, clock: int = 0) -> int:
        """Set values; a row that exists keeps its optimizer state and its count. Returns rows written."""
        keys, values = self._keys(keys), self._floats(keys, values)
        if only_absent:
            missing = np.flatnonzero(~self.contains(keys))
            first = missing[np.sort(np.unique(keys[missing], return_index=True)[1])]
            keys, values = keys[first], values[first]
        slots = self._records.make(keys, clock=clock)
        self._records.floats[slots, VALUES : VALUES + self.spec.dim] = values
        self._forget(keys)
        self._hold(slots)
        return int(keys.size)

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        return self.slots(keys) >= 0

    def slots(self, keys: Keys) -> Keys:
        """Record slot of each key, -1 where it has no row."""
        return self._records.locate(self._keys(keys))

    def last_seen(self, keys: Keys) -> NDArray[np.uint32]:
        """The clock of the last change of each key's row; 0 where it has none."""
        slots = self.slots(keys)
        return np.where(slots < 0, np.uint32(0), self._records.words[slots, LAST_SEEN])

    def require_room(self, batches: Sequence[Keys]) -> None:
        """Raises if pushes of all these keys would not fit into the table."""
        self._records.require_room(batches)

    def delete(self, keys: Keys) -> int:
        """Drop the rows and admission counters of these keys. Returns rows dropped."""
        keys = self._keys(keys)
        self._forget(keys)
        return int(delete_rows(self._records.store, keys))

    def victims(self, eviction: Eviction, *, clock: int) -> Keys:
        """Keys that a shrink drops, ascending; candidates for admission go by age alone. Drops nothing."""
        rows = evicting.victims(self._records, eviction, clock=clock)
        stale = evicting.victims(self._candidates, Eviction(max_age=eviction.max_age), clock=clock)
        return np.sort(np.concatenate([rows, stale]))

    def hot(self, top: int) -> tuple[Keys, Keys]:
        """The keys touched most often and their counts, the most frequent first."""
        return evicting.hot(self._records, top)

    def records(self, start: int, stop: int, *, since: int | None = None) -> NDArray[np.void]:
        """A copy of the live records in slots [start, stop); `since`: only those with last_seen >= since."""
        return self._records.copy_out(start, stop, since=since).view(self._dtype).reshape(-1)

    def load_records(self, records: NDArray[np.void]) -> None:
        """Insert whole records, or overwrite by key."""
        if records.dtype != self._dtype:
            raise TableError(f"table {self.spec.name}: records of another layout: {records.dtype}")
        self._records.copy_in(records)
        self._forget(np.ascontiguousarray(records["key"]))

    def candidates(self) -> NDArray[np.void]:
        """Admission counters: key, last_seen, count of keys that were pushed and have no row."""
        return self._candidates.copy_out(0, self._candidates.num_slots).view(META_DTYPE).reshape(-1)

    def load_candidates(self, candidates: NDArray[np.void]) -> None:
        """Insert admission counters, or overwrite by key; ignored by a table that admits at once."""
        if candidates.dtype != META_DTYPE:
            raise TableError(f"table {self.spec.name}: candidates of another layout: {candidates.dtype}")
        if self.spec.admit_after > 1:
            self._candidates.copy_in(candidates)

    def _change(self, keys: Keys, values: Rows, slots: Keys, update: Update) -> None:
        keys, values = self._keys(keys), self._floats(keys, values)
        self._records.push(keys, values, slots, update, candidates=self._candidates, constants=self._constants)

    def _forget(self, keys: Keys) -> None:
        """A key has a row or is a candidate, never both."""
        if self._candidates.num_rows:
            delete_rows(self._candidates.store, keys)

    def _hold(self, slots: Keys) -> None:
        if self._rule.kernel == FTRL:
            optimizer = self.spec.optimizer
            hold_values(self._records.floats, slots, self.spec.dim, optimizer.learning_rate, self._constants)

    def _keys(self, keys: Keys) -> Keys:
        if keys.ndim != 1:
            raise TableError(f"table {self.spec.name}: keys have {keys.ndim} dimensions, not 1")
        return kernel_array(keys, np.int64)

    def _floats(self, keys: Keys, values: Rows) -> Rows:
        if values.shape != (keys.size, self.spec.dim):
            raise TableError(
                f"table {self.spec.name}: {values.shape} values for {keys.size} keys of {self.spec.dim} columns"
            )
        return kernel_array(values, np.float32)
