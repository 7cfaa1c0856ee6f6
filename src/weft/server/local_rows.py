"""Rows that a geo worker trains by itself for K units, then exchanges with the servers.

    delta = local - base
    server row += delta, or its part where servers average; local = base = the server's row afterwards

Only rows of this round count as known: those exchanged last, and those read since. Any other is read again before it
is used, for somebody else may have changed it; its optimizer state stays here. Rows whose changes are exchanged may be
dropped, so the cache is bounded at each exchange. Admission does not apply: what a worker learnt has been learnt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from weft.core.errors import WorkerError
from weft.core.table_spec import Eviction, RowInit, RowOptimizer, TableSpec
from weft.server.client import Client
from weft.server.rates import local_optimizer
from weft.server.server_rows import Gradients
from weft.server.session import Keys, Rows
from weft.server.table.table import Table


class LocalRows:
    def __init__(
        self, client: Client, specs: Iterable[TableSpec], *, exchange_every: int, cache_rows: int, shares: int = 1
    ) -> None:
        """`shares`: the workers over which servers average; 1 where they sum."""
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

    def settle(self) -> bool:
        """One exchange of everything that changed."""
        units, self._units = self._units, []
        deltas = {name: cache.deltas() for name, cache in self._caches.items()}
        deltas = {name: pair for name, pair in deltas.items() if len(pair[0])}
        try:
            fresh = self._client.exchange(deltas, units=units)
        except WorkerError:  # somebody did some of these units in the meantime
            self._caches = self._fresh()
            return False
        for name, rows in fresh.items():
            self._caches[name].settle(deltas[name][0], rows, max_rows=self._cache_rows)
        return True

    def _fresh(self) -> dict[str, _Cache]:
        return {spec.name: _Cache(spec) for spec in self._specs}


class _Cache:
    """One table: rows as trained here (with optimizer state), and as the servers had them (`base`)."""

    def __init__(self, spec: TableSpec) -> None:
        plain = {"eviction": Eviction(), "tier": "memory", "admit_after": 1}
        self._local = Table(spec.model_copy(update=plain))
        # A base holds values alone: sgd has no state.
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

    def settle(self, keys: Keys, rows: Rows, *, max_rows: int) -> None:
        self._round += 1
        self._touched = []
        self._local.assign(keys, rows, only_absent=False, clock=self._round)
        self._base.assign(keys, rows, only_absent=False)
        known = np.concatenate([*self._known, keys])
        self._base.delete(known[~np.isin(known, keys)])  # others may have changed these meanwhile
        self._known = [keys]
        if self._local.num_rows > max_rows:
            self._drop(self._local.victims(Eviction(max_rows=max_rows), clock=self._round))

    def _drop(self, keys: Keys) -> None:
        self._local.delete(keys)
        self._base.delete(keys)
        self._known = [known[~np.isin(known, keys)] for known in self._known]


def _pulled(table: Table, keys: Keys) -> Rows:
    rows = np.empty((len(keys), table.spec.dim), dtype=np.float32)
    table.pull(keys, rows)
    return rows
