"""Replicated dense parameters: gradients are all-reduced over the workers, and each applies the same update.

Not elastic: an all-reduce needs all workers, so the death of one ends the run. The update is that of a `Table`, as on
a server.

    g = all_reduce(sum of gradients) / all_reduce(samples);  w = optimizer(w, g)

The worker of share 0 copies them to the servers at evaluations, snapshots and the end ("dense": values;
"dense.records": whole records with optimizer state).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from weft.core.errors import WorkerError, first_line
from weft.core.table_spec import DENSE_TABLE, RowInit, RowOptimizer, TableSpec
from weft.server.arrays import Rows
from weft.server.client import Client
from weft.server.model.dense import DenseBlocks
from weft.server.table.record import record_dtype
from weft.server.table.table import Table

RECORDS_TABLE = "dense.records"


def records_spec(spec: TableSpec) -> TableSpec:
    """A table with the records of the dense table as rows, bit by bit."""
    words = record_dtype(spec).itemsize // 4
    return TableSpec(name=RECORDS_TABLE, dim=words, optimizer=RowOptimizer(kind="sgd"), init=RowInit(kind="zeros"))


class AllReduce:
    """Sums over the workers of a run. Group and store belong to this object, so workers may be threads too."""

    def __init__(self, *, host: str, port: int, rank: int, size: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, is_master=False, timeout=self._timeout)
        self._group: Any = ProcessGroupGloo(store, rank, size, self._timeout)

    def sum(self, values: Rows) -> Rows:
        tensor = torch.from_numpy(values)
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise WorkerError(
                f"another worker is gone, and replicated dense parameters need all of them: {first_line(error)[:200]}",
                hint='dense.place = "servers" continues without it; --resume restarts from the last snapshot',
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

    def step(self, gradients: Rows, *, weight: float) -> None:
        flat = np.append(gradients.reshape(-1), np.float32(weight))
        total = self._reduce.sum(flat)
        if total[-1] > 0:
            rows = total[:-1].reshape(gradients.shape)
            self._table.push(self._blocks.keys, rows, gradient_scale=1.0 / float(total[-1]))

    def save(self) -> None:
        """Copies values and records to the servers."""
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
        if words.view(np.uint32).any():  # saved by an earlier part of the run
            self._table.load_records(np.frombuffer(words.tobytes(), dtype=record_dtype(self._table.spec)))
