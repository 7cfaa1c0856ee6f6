"""One set of learning rates: under noise, the three modes go as far as each other with every optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from weft.core.server_spec import ServerRun
from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.rates import local_optimizer, push_rate
from weft.server.table.table import Table
from weft.server.worker.rows import LocalRows, ServerRows
from weft.server.worker.worker import _assembled

SHARES, STEPS, DIM = 4, 1000, 64
KEY = np.array([1], np.int64)
OPTIMIZERS = [
    RowOptimizer(kind="sgd", learning_rate=0.01),
    RowOptimizer(kind="adagrad", learning_rate=0.01, initial_accumulator=100.0),
    RowOptimizer(kind="rowwise_adagrad", learning_rate=0.01),
    RowOptimizer(kind="adam", learning_rate=0.01),
    RowOptimizer(kind="ftrl", learning_rate=0.01, beta=5.0),
]


def _table(optimizer: RowOptimizer) -> Table:
    return Table(TableSpec(name="t", dim=DIM, optimizer=optimizer, init=RowInit(kind="zeros")))


def _row(table: Table) -> np.ndarray:
    rows = np.empty((1, DIM), np.float32)
    table.pull(KEY, rows)
    return rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_modes_go_as_far_as_sync_where_noise_dominates(optimizer: RowOptimizer) -> None:
    # A mean over one share: a small drift, and noise ten times as large.
    means = 0.1 + np.random.default_rng(0).standard_normal((STEPS, SHARES, 1, DIM)).astype(np.float32)
    sync, pushed = _table(optimizer), _table(optimizer)
    local = [_table(local_optimizer(optimizer, shares=SHARES)) for _ in range(SHARES)]
    rate = push_rate(optimizer, shares=SHARES)
    for step in means:
        sync.push(KEY, step.mean(axis=0))
        for worker, mean in zip(local, step, strict=True):
            pushed.push(KEY, mean, gradient_scale=1 / SHARES, lr_scale=rate)
            worker.push(KEY, mean)
    far = float(_row(sync).mean())
    assert far < -0.05
    assert float(_row(pushed).mean()) == pytest.approx(far, rel=0.05)
    assert float(np.mean([_row(table) for table in local])) == pytest.approx(far, rel=0.05)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_one_worker_trains_as_in_sync(optimizer: RowOptimizer) -> None:
    assert local_optimizer(optimizer, shares=1) == optimizer
    assert push_rate(optimizer, shares=1) == 1.0


class _Client:
    def create(self, spec: TableSpec) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "parts"),
    [({"mode": "sync"}, 1), ({"mode": "async", "staleness": 0}, 1), ({"mode": "async"}, 4)],
)
def test_a_push_is_a_part_where_servers_do_not_sum(given: dict[str, Any], parts: int) -> None:
    rows = _rows_of(given)
    assert isinstance(rows, ServerRows)
    assert rows._parts == parts


@pytest.mark.parametrize(("merge", "factor"), [("average", 2.0), ("sum", 1.0)])
def test_a_geo_worker_steps_further_where_servers_average(merge: str, factor: float) -> None:
    rows = _rows_of({"mode": "geo", "geo_merge": merge})
    assert isinstance(rows, LocalRows)
    assert rows._specs[-1].optimizer.learning_rate == ServerRun().dense.optimizer.learning_rate * factor


def _rows_of(given: dict[str, Any]) -> Any:
    run = ServerRun.from_tables({"server": {"workers": 4, **given}})
    return _assembled(run, {}, nn.Linear(2, 1), _Client())[0]  # type: ignore[arg-type]
