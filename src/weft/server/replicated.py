"""Dense parameters that every worker holds whole: gradients are summed over all workers, each makes the same update.

Not for elastic runs: a sum needs everybody, so a worker's death ends the run. The update is a `Table`'s, as on a
server, so each rule is written once.

    g = all_reduce(sum of gradients) / all_reduce(samples);  w = optimizer(w, g)

The servers get a copy at evaluations, snapshots and at the end ("dense": values; "dense.records": whole records with
optimizer state), from the worker that has share 0.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from weft.core.errors import WorkerError
from weft.core.table_spec import DENSE_TABLE, RowInit, RowOptimizer, TableSpec
from weft.server.client import Client
from weft.server.dense import DenseBlocks
from weft.server.table.table import Table, record_dtype

RECORDS_TABLE = "dense.records"


def records_spec(spec: TableSpec) -> TableSpec:
    """A table whose rows are the dense table's records, bit by bit."""
    words = record_dtype(spec).itemsize // 4
    plain = RowOptimizer(kind="sgd")
    return TableSpec(name=RECORDS_TABLE, dim=words, optimizer=plain, init=RowInit(kind="zeros"))


class AllReduce:
    """Sums over the workers of a run. Group and store are this object's own, so workers may be threads too."""

    def __init__(self, *, host: str, port: int, rank: int, size: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, is_master=False, timeout=self._timeout)
        self._group: Any = ProcessGroupGloo(store, rank, size, self._timeout)

    def sum(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        tensor = torch.from_numpy(values)
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise WorkerError(
                f"another worker is gone, and replicated dense parameters need all of them: {_first_line(error)}",
                hint='dense.place = "servers" goes on without it; --resume starts again from the last snapshot',
            ) from None
        return values


class ReplicatedDense:
    def __init__(self, blocks: DenseBlocks, spec: TableSpec, client: Client, reduce: AllReduce) -> None:
        self._blocks, self._client, self._reduce = blocks, client, reduce
        self._table = Table(spec)
        client.create(records_spec(spec))
        self._restore()

    def load(self) -> None:
        rows = np.empty((len(self._blocks.keys), self._table.spec.dim), dtype=np.float32)
        self._table.pull(self._blocks.keys, rows)
        self._blocks.load(rows)

    def step(self, gradients: NDArray[np.float32], *, weight: float) -> None:
        flat = np.append(gradients.reshape(-1), np.float32(weight))
        total = self._reduce.sum(flat)
        if total[-1] > 0:
            rows = total[:-1].reshape(gradients.shape)
            self._table.push(self._blocks.keys, rows, gradient_scale=1.0 / float(total[-1]))

    def save(self) -> None:
        """The servers' copy."""
        records = self._table.records(0, self._table.num_slots)
        keys = np.ascontiguousarray(records["key"])
        values = np.ascontiguousarray(records["values"]).reshape(len(keys), -1)
        self._client.assign(DENSE_TABLE, keys, values, only_absent=False)
        words = np.frombuffer(records.tobytes(), dtype=np.float32).reshape(len(keys), -1)
        self._client.assign(RECORDS_TABLE, keys, words, only_absent=False)

    def _restore(self) -> None:
        keys = self._blocks.keys
        rows = self._client.pull({DENSE_TABLE: keys, RECORDS_TABLE: keys}).rows
        self._table.assign(keys, rows[DENSE_TABLE], only_absent=False)
        words = rows[RECORDS_TABLE]
        if words.view(np.uint32).any():  # an earlier part of the run left them
            self._table.load_records(np.frombuffer(words.tobytes(), dtype=record_dtype(self._table.spec)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
