"""`RowSource`: where rows of a worker come from and its gradients go. `ServerRows`: sync and async; `LocalRows`: geo.

    ServerRows   pull(unit) waits at the gate; push(unit) is applied once, however often a unit is done
    LocalRows    trains rows locally for K units, then exchanges delta = local - base with the servers:
                 server row += delta (or its share where servers average); local = base = the server's row afterwards

A geo worker knows only rows of the current round: those exchanged last, and those read since. It reads any other row
again before use, since another worker may have changed it; its optimizer state stays local. Exchanged rows may be
dropped, so the cache is bounded at each exchange. Admission does not apply to exchanged rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from weft.core.errors import WorkerError
from weft.core.table_spec import Eviction, RowInit, RowOptimizer, TableSpec
from weft.server.arrays import Keys, Rows
from weft.server.client import Client
from weft.server.rates import local_optimizer
from weft.server.table.table import Table

Gradients = Mapping[str, tuple[Keys, Rows]]


class RowSource(Protocol):
    def open(self, unit: int) -> None:
        """Starts a unit: the next reads are for it."""

    def read(self, wanted: Mapping[str, Keys]) -> Mapping[str, Rows]: ...

    def finish(self, gradients: Gradients, *, weight: float) -> tuple[int, ...]:
        """Sums of gradients over `weight` samples; returns the staleness on each server."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether local changes must be flushed now."""
        ...

    def flush(self) -> bool:
        """Sends all local changes to the servers; False: they refused them, and they are dropped here too."""
        ...


class ServerRows:
    def __init__(self, client: Client, *, parts: int = 1) -> None:
        """`parts`: pushes per step if each is applied on its own (`rates.py`); 1 if servers sum them."""
        self._client, self._parts = client, parts
        self._unit = 0
        self._versions: tuple[int, ...] | None = None

    def open(self, unit: int) -> None:
        self._unit, self._versions = unit, None

    def read(self, wanted: Mapping[str, Keys]) -> Mapping[str, Rows]:
        pulled = self._client.pull(wanted, unit=self._unit)
        # The first pull of a unit is the oldest: staleness counts from there.
        self._versions = self._versions or pulled.versions
        return pulled.rows

    def finish(self, gradients: Gradients, *, weight: float) -> tuple[int, ...]:
        weight *= self._parts
        pushed = self._client.push(gradients, unit=self._unit, weight=weight, versions=self._versions, unique=True)
        return pushed.staleness

    @property
    def is_due(self) -> bool:
        return True

    def flush(self) -> bool:
        return True


class LocalRows:
    def __init__(
        self, client: Client, specs: Iterable[TableSpec], *, exchange_every: int, cache_rows: int, shares: int = 1
    ) -> None:
        """`shares`: the workers over which servers average; 1 if they sum."""
        self._client = client
        self._specs = [
            spec.model_copy(update={"optimizer": local_optimizer(spec.optimizer, shares=shares)}) for spec in specs
        ]
        self._caches = self._fresh()
        self._exchange_every = exchange_every
        self._cache_rows = cache_rows
        self._units: list[int] = []  # since the last exchange

    def open(self, unit: int) -> None:
        self._units.append(unit)

    def read(self, wanted: Mapping[str, Keys]) -> Mapping[str, Rows]:
        unknown = {name: self._caches[name].unknown(keys) for name, keys in wanted.items()}
        asked = {name: keys for name, keys in unknown.items() if len(keys)}
        if asked:
            for name, rows in self._client.pull(asked).rows.items():
                self._caches[name].learn(asked[name], rows)
        return {name: self._caches[name].values(keys) for name, keys in wanted.items()}

    def finish(self, gradients: Gradients, *, weight: float) -> tuple[int, ...]:
        for name, (keys, values) in gradients.items():
            self._caches[name].train(keys, values, weight=weight)
        return ()

    @property
    def is_due(self) -> bool:
        num_rows = sum(cache.num_rows for cache in self._caches.values())
        return len(self._units) >= self._exchange_every or num_rows > self._cache_rows

    def flush(self) -> bool:
        """One exchange of all changed rows."""
        units, self._units = self._units, []
        deltas = {name: cache.deltas() for name, cache in self._caches.items()}
        deltas = {name: pair for name, pair in deltas.items() if len(pair[0])}
        try:
            fresh = self._client.exchange(deltas, units=units)
        except WorkerError:  # another worker did some of these units meanwhile
            self._caches = self._fresh()
            return False
        for name, rows in fresh.items():
            self._caches[name].rebase(deltas[name][0], rows, max_rows=self._cache_rows)
        return True

    def _fresh(self) -> dict[str, _Cache]:
        return {spec.name: _Cache(spec) for spec in self._specs}


class _Cache:
    """One table: local rows with optimizer state, and the rows of the servers (`base`)."""

    def __init__(self, spec: TableSpec) -> None:
        plain = {"eviction": Eviction(), "tier": "memory", "admit_after": 1}
        self._local = Table(spec.model_copy(update=plain))
        # The base holds values only: sgd has no state.
        bare = {**plain, "optimizer": RowOptimizer(kind="sgd"), "init": RowInit(kind="zeros")}
        self._base = Table(spec.model_copy(update=bare))
        self._known: list[Keys] = []  # all of base
        self._touched: list[Keys] = []
        self._round = 0

    @property
    def num_rows(self) -> int:
        return self._local.num_rows

    def unknown(self, keys: Keys) -> Keys:
        return keys[~self._base.contains(keys)]

    def learn(self, keys: Keys, rows: Rows) -> None:
        self._local.assign(keys, rows, only_absent=False, clock=self._round)
        self._base.assign(keys, rows, only_absent=False)
        self._known.append(keys)

    def values(self, keys: Keys) -> Rows:
        return _pulled(self._local, keys)

    def train(self, keys: Keys, gradients: Rows, *, weight: float) -> None:
        scale = 1.0 / weight if weight else 0.0
        self._local.push(keys, gradients, gradient_scale=scale, clock=self._round)
        self._touched.append(keys)

    def deltas(self) -> tuple[Keys, Rows]:
        if not self._touched:
            return np.empty(0, dtype=np.int64), np.empty((0, self._local.spec.dim), dtype=np.float32)
        keys = np.unique(np.concatenate(self._touched))
        return keys, _pulled(self._local, keys) - _pulled(self._base, keys)

    def rebase(self, keys: Keys, rows: Rows, *, max_rows: int) -> None:
        self._round += 1
        self._touched = []
        self._local.assign(keys, rows, only_absent=False, clock=self._round)
        self._base.assign(keys, rows, only_absent=False)
        known = np.concatenate([*self._known, keys])
        self._base.delete(known[~np.isin(known, keys)])  # other workers may have changed these
        self._known = [keys]
        if self._local.num_rows > max_rows:
            dropped = self._local.victims(Eviction(max_rows=max_rows), clock=self._round)
            self._local.delete(dropped)
            self._base.delete(dropped)
            self._known = [keys[~np.isin(keys, dropped)]]


def _pulled(table: Table, keys: Keys) -> Rows:
    rows = np.empty((len(keys), table.spec.dim), dtype=np.float32)
    table.pull(keys, rows)
    return rows
