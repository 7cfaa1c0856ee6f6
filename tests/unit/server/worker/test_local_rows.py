"""Geo's local rows against ten lines of numpy: deltas, merging, what is read again, the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.core.errors import WorkerError
from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.arrays import Keys, Rows
from weft.server.client import Pulled
from weft.server.worker.rows import LocalRows

SPEC = TableSpec(name="t", dim=2, optimizer=RowOptimizer(kind="sgd", learning_rate=1.0), init=RowInit(kind="zeros"))


class _Servers:
    """Rows in a dict; a client as far as LocalRows uses one."""

    def __init__(self) -> None:
        self.rows: dict[int, Rows] = {}
        self.pulled: list[list[int]] = []
        self.exchanged: list[list[int]] = []
        self.units: list[int] = []

    def pull(self, wanted: Mapping[str, Keys]) -> Pulled:
        self.pulled.append(wanted["t"].tolist())
        return Pulled(rows={"t": self._read(wanted["t"])}, versions=(0,))

    def exchange(self, deltas: Mapping[str, tuple[Keys, Rows]], *, units: Sequence[int]) -> dict[str, Rows]:
        if set(units) & set(self.units):
            raise WorkerError("done by another")
        self.units += units
        keys, values = deltas["t"]
        self.exchanged.append(keys.tolist())
        for key, value in zip(keys.tolist(), values, strict=True):
            self.rows[key] = self.rows.get(key, np.zeros(2, np.float32)) + value
        return {"t": self._read(keys)}

    def _read(self, keys: Keys) -> Rows:
        return np.stack([self.rows.get(int(key), np.zeros(2, np.float32)) for key in keys])


def _local(servers: Any, *, cache_rows: int = 100, every: int = 2) -> LocalRows:
    return LocalRows(servers, [SPEC], exchange_every=every, cache_rows=cache_rows)


def _keys(*keys: int) -> Keys:
    return np.array(keys, dtype=np.int64)


def _step(local: LocalRows, keys: Keys, gradient: float, *, unit: int = 0) -> None:
    local.open(unit)
    local.read({"t": keys})
    local.finish({"t": (keys, np.full((len(keys), 2), gradient, np.float32))}, weight=1.0)


def test_local_steps_reach_the_servers_as_one_difference() -> None:
    servers = _Servers()
    local = _local(servers)
    _step(local, _keys(1, 2), 1.0)
    assert not local.is_due
    _step(local, _keys(2, 3), 3.0, unit=1)
    assert local.is_due
    assert servers.exchanged == []
    assert local.flush()
    assert (servers.exchanged, servers.units) == ([[1, 2, 3]], [0, 1])
    assert {key: float(row[0]) for key, row in servers.rows.items()} == {1: -1.0, 2: -4.0, 3: -3.0}
    np.testing.assert_array_equal(local.read({"t": _keys(2)})["t"], [[-4.0, -4.0]])


def test_where_servers_average_a_worker_steps_further() -> None:
    """Its sums of squares are those of one share: rate times the root of 4, accumulator times 4."""
    servers = _Servers()
    adagrad = RowOptimizer(kind="adagrad", learning_rate=0.5, initial_accumulator=2.0)
    local = LocalRows(
        servers,  # type: ignore[arg-type]
        [SPEC.model_copy(update={"optimizer": adagrad})],
        exchange_every=1,
        cache_rows=100,
        shares=4,
    )
    _step(local, _keys(1), 1.0)
    local.flush()
    np.testing.assert_allclose(servers.rows[1], -0.5 * 2 / np.sqrt(4 * 2.0 + 1), rtol=1e-6)


def test_a_row_not_in_the_last_exchange_is_read_again() -> None:
    servers = _Servers()
    local = _local(servers)
    _step(local, _keys(1), 1.0)
    local.flush()
    _step(local, _keys(2), 1.0, unit=1)
    local.flush()
    servers.rows[1] = np.array([7.0, 7.0], np.float32)  # another worker
    np.testing.assert_array_equal(local.read({"t": _keys(1)})["t"], [[7.0, 7.0]])
    assert servers.pulled == [[1], [2], [1]]


def test_what_servers_refuse_is_forgotten_here_too() -> None:
    servers = _Servers()
    local = _local(servers)
    _step(local, _keys(1), 1.0)
    servers.units, servers.rows[1] = [0], np.array([7.0, 7.0], np.float32)  # another worker did it
    assert not local.flush()
    np.testing.assert_array_equal(local.read({"t": _keys(1)})["t"], [[7.0, 7.0]])
    _step(local, _keys(1), 1.0, unit=1)
    assert local.flush()
    assert float(servers.rows[1][0]) == 6.0


def test_the_cache_is_bounded_and_what_is_dropped_was_exchanged() -> None:
    servers = _Servers()
    local = _local(servers, cache_rows=3, every=100)
    _step(local, _keys(1, 2), 1.0)
    assert not local.is_due
    _step(local, _keys(3, 4), 1.0)
    assert local.is_due  # too many rows, long before 100 units
    local.flush()
    assert local._caches["t"].num_rows == 3
    assert sorted(servers.rows) == [1, 2, 3, 4]
    np.testing.assert_array_equal(local.read({"t": _keys(1, 2, 3, 4)})["t"], np.full((4, 2), -1.0))
