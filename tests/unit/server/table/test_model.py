"""Any sequence of operations against a dictionary. Gradients are whole numbers, so that float32 is exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.table import store
from weft.server.table.record import record_dtype
from weft.server.table.table import Table

from .conftest import HARD_KEYS

DIM = 3
KEYS = st.one_of(st.sampled_from(HARD_KEYS), st.integers(0, 300))
VERBS = ("push", "add", "assign", "assign_absent", "delete", "load")


@dataclass
class Model:
    """What a table is, said plainly: sgd at a learning rate of 1 from zeros."""

    admit_after: int
    rows: dict[int, list[int]] = field(default_factory=dict)  # key: value, last_seen, count
    candidates: dict[int, list[int]] = field(default_factory=dict)  # key: last_seen, count

    def push(self, key: int, value: int, clock: int) -> None:
        if key not in self.rows:
            before = self.candidates.get(key, [0, 0])[1]
            if before + 1 < self.admit_after:
                self.candidates[key] = [clock, before + 1]
                return
            self.rows[key] = [0, 0, before]
            self.candidates.pop(key, None)
        row = self.rows[key]
        self.rows[key] = [row[0] - value, clock, row[2] + 1]

    def add(self, key: int, value: int, clock: int) -> None:
        row = self.rows.get(key, [0, 0, 0])
        self.rows[key] = [row[0] + value, clock, row[2] + 1]
        self.candidates.pop(key, None)

    def assign(self, key: int, value: int, clock: int) -> None:
        self.rows[key] = [value, clock, self.rows.get(key, [0, 0, 0])[2]]
        self.candidates.pop(key, None)

    def assign_absent(self, key: int, value: int, clock: int) -> None:
        if key not in self.rows:
            self.assign(key, value, clock)

    def delete(self, key: int, value: int, clock: int) -> None:
        self.rows.pop(key, None)
        self.candidates.pop(key, None)

    def load(self, key: int, value: int, clock: int) -> None:
        self.rows[key] = [value, clock, value + 7]
        self.candidates.pop(key, None)


def apply(table: Table, verb: str, keys: np.ndarray, values: np.ndarray, clock: int) -> None:
    lines = np.repeat(values[:, None], DIM, axis=1).astype(np.float32)
    if verb == "push":
        table.push(keys, lines, clock=clock)
    elif verb == "add":
        table.add(keys, lines, clock=clock)
    elif verb == "delete":
        table.delete(keys)
    elif verb == "load":
        records = np.zeros(keys.size, dtype=record_dtype(table.spec))
        records["key"], records["last_seen"], records["count"], records["values"] = keys, clock, values + 7, lines
        table.load_records(records)
    else:
        table.assign(keys, lines, only_absent=verb == "assign_absent", clock=clock)


def compare(table: Table, model: Model) -> None:
    records = table.records(0, table.num_slots)
    seen = {int(r["key"]): [int(r["values"][0]), int(r["last_seen"]), int(r["count"])] for r in records}
    assert (seen, len(records)) == (model.rows, table.num_rows)
    candidates = {int(c["key"]): [int(c["last_seen"]), int(c["count"])] for c in table.candidates()}
    assert candidates == model.candidates
    keys = np.array([*model.rows, *model.candidates, 10**9], dtype=np.int64)
    out = np.full((keys.size, DIM), np.nan, dtype=np.float32)
    table.pull(keys, out)
    assert out.tolist() == [[float(model.rows.get(key, [0])[0])] * DIM for key in keys.tolist()]
    assert table.contains(keys).tolist() == [key in model.rows for key in keys.tolist()]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(VERBS), st.lists(st.tuples(KEYS, st.integers(0, 9)), max_size=40)), max_size=12
)


def check(operations: list[tuple[str, list[tuple[int, int]]]], admit_after: int) -> None:
    spec = TableSpec(
        name="t",
        dim=DIM,
        admit_after=admit_after,
        optimizer=RowOptimizer(kind="sgd", learning_rate=1.0),
        init=RowInit(kind="zeros"),
    )
    table, model, most = Table(spec), Model(admit_after), 0
    for clock, (verb, pairs) in enumerate(operations):
        keys, values = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
        apply(table, verb, keys, values, clock)
        for key, value in pairs:
            getattr(model, verb)(key, value, clock)
            most = max(most, len(model.rows))
        compare(table, model)
    assert table.num_slots <= most  # slots of deleted rows are used again


@pytest.fixture(autouse=True)
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that runs are long, wrap around, and grow."""
    monkeypatch.setattr(store, "MIN_CAPACITY", 24)


FIXTURE_ONCE = [HealthCheck.function_scoped_fixture]


@given(operations=OPERATIONS, admit_after=st.sampled_from([1, 1, 2, 3]))
@settings(max_examples=150, suppress_health_check=FIXTURE_ONCE)
def test_any_sequence_equals_a_dictionary(
    operations: list[tuple[str, list[tuple[int, int]]]], admit_after: int
) -> None:
    check(operations, admit_after)


@pytest.mark.slow
@given(operations=OPERATIONS, admit_after=st.sampled_from([1, 1, 2, 3]))
@settings(max_examples=10_000, suppress_health_check=[*FIXTURE_ONCE, HealthCheck.too_slow])
def test_many_sequences_equal_a_dictionary(
    operations: list[tuple[str, list[tuple[int, int]]]], admit_after: int
) -> None:
    check(operations, admit_after)
