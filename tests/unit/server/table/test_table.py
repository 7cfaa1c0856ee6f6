"""What a table promises beyond its arithmetic: slots are reused, records are whole, a full table changes nothing."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.errors import TableError
from weft.core.table_spec import Eviction, RowOptimizer, TableSpec
from weft.server.table.record import META_DTYPE, record_dtype, state_width
from weft.server.table.table import Table


def build(kind: Any = "adagrad", *, dim: int = 5, **fields: Any) -> TableSpec:
    return TableSpec(name="t", dim=dim, optimizer=RowOptimizer(kind=kind), **fields)


def lines(num: int, dim: int = 5, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, dim)).astype(np.float32)


def rows_of(table: Table, keys: np.ndarray) -> np.ndarray:
    out = np.empty((keys.size, table.spec.dim), dtype=np.float32)
    table.pull(keys, out)
    return out


@pytest.mark.parametrize(
    ("kind", "width"), [("sgd", 0), ("adagrad", 5), ("rowwise_adagrad", 1), ("adam", 11), ("ftrl", 10)]
)
def test_records_carry_everything(kind: str, width: int) -> None:
    spec = build(kind)
    assert state_width(spec) == width
    assert record_dtype(spec).itemsize == 16 + 4 * (5 + width)
    keys = np.arange(3000) * 7 - 99
    table, copy = Table(spec), Table(spec)
    table.push(keys, lines(3000), clock=4)
    table.push(keys[::3].copy(), lines(1000, seed=1), clock=6)
    table.delete(keys[1::3].copy())
    for start in range(0, table.num_slots, 700):
        copy.load_records(table.records(start, start + 700))
    assert copy.num_rows == table.num_rows == 2000
    np.testing.assert_array_equal(rows_of(copy, keys), rows_of(table, keys))
    for one in (table, copy):
        one.push(keys, lines(3000, seed=2), clock=7)
    ours, theirs = (np.sort(one.records(0, one.num_slots), order="key") for one in (table, copy))
    assert ours.tobytes() == theirs.tobytes()


def test_records_since() -> None:
    table = Table(build())
    table.push(np.arange(10), lines(10), clock=3)
    table.push(np.arange(4), lines(4), clock=5)
    assert sorted(table.records(0, 10, since=4)["key"].tolist()) == [0, 1, 2, 3]
    assert len(table.records(0, 10, since=3)) == 10
    assert len(table.records(0, 10, since=6)) == 0
    assert len(table.records(7, 7)) == 0
    assert len(table.records(8, 1000)) == 2


def test_records_are_copies() -> None:
    table = Table(build())
    table.push(np.arange(3), lines(3))
    copy = table.records(0, 3)
    before = copy.tobytes()
    table.push(np.arange(3), lines(3, seed=1))
    assert copy.tobytes() == before


def test_a_large_table_grows_and_finds_everything() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200_000)
    table = Table(build("sgd", dim=2))
    table.push(keys, lines(200_000, 2), clock=1)
    assert table.num_rows == table.num_slots == np.unique(keys).size
    slots = table.slots(keys)
    assert np.unique(slots).size == table.num_rows
    assert (table.slots(keys ^ 1) == -1).sum() > 199_000
    assert table.nbytes < 200_000 * (24 + 16.1) + 17_000  # records, index at a load of at least 1/2, candidates
    assert table.delete(keys[:150_000]) == 150_000
    np.testing.assert_array_equal(table.slots(keys[150_000:]), slots[150_000:])
    table.push(keys[:150_000] ^ 5, lines(150_000, 2))
    assert table.num_slots == 200_000


def test_assign_keeps_state_and_only_absent_writes_the_first() -> None:
    table = Table(build())
    table.push(np.array([1, 2]), lines(2), clock=1)
    state = table.records(0, 2)["state"].copy()
    values = np.arange(20, dtype=np.float32).reshape(4, 5)
    assert table.assign(np.array([1, 9, 9, 8]), values, only_absent=True, clock=5) == 2
    np.testing.assert_array_equal(rows_of(table, np.array([9, 8])), values[[1, 3]])
    assert table.assign(np.array([1, 2]), values[:2], only_absent=False, clock=6) == 2
    np.testing.assert_array_equal(rows_of(table, np.array([1, 2])), values[:2])
    records = np.sort(table.records(0, 9), order="key")
    assert records["last_seen"].tolist() == [6, 6, 5, 5]
    assert records["count"].tolist() == [1, 1, 0, 0]
    np.testing.assert_array_equal(records["state"][:2], state)


def test_admission_by_the_nth_push() -> None:
    table, key = Table(build("sgd", admit_after=3)), np.array([7])
    first = rows_of(table, key)
    for clock in (1, 2):
        table.push(key, lines(1), clock=clock)
    assert (table.num_rows, table.candidates().tolist()) == (0, [(7, 2, 2)])
    np.testing.assert_array_equal(rows_of(table, key), first)
    table.push(key, lines(1), clock=3)
    np.testing.assert_allclose(rows_of(table, key), first - 0.05 * lines(1), rtol=1e-6)
    assert (table.num_rows, len(table.candidates())) == (1, 0)
    assert table.records(0, 1)["count"].tolist() == [3]


def test_candidates_travel_and_are_forgotten_with_delete() -> None:
    spec = build("sgd", admit_after=2)
    table, copy = Table(spec), Table(spec)
    table.push(np.arange(5000), lines(5000), clock=9)
    copy.load_candidates(table.candidates())
    assert copy.candidates().dtype == META_DTYPE
    assert copy.delete(np.arange(10)) == 0
    copy.push(np.arange(20), lines(20), clock=10)
    assert copy.num_rows == 10
    assert not copy.contains(np.arange(10)).any()


def test_victims_by_age_count_and_cap() -> None:
    table = Table(build("sgd"))
    for clock, keys in enumerate([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4], [1, 2], [-9]]):
        table.push(np.array(keys), lines(len(keys)), clock=clock)

    def gone(**fields: int) -> list[int]:
        return table.victims(Eviction(**fields), clock=4).tolist()

    assert gone() == []
    assert gone(max_age=3) == [5, 6]
    assert gone(max_age=4) == []
    assert gone(min_count=2) == [-9, 5, 6]
    assert gone(max_rows=7) == []
    assert gone(max_rows=6) == [6]  # 5 and 6 are equal: the larger key goes
    assert gone(max_rows=5) == [5, 6]
    assert gone(max_rows=4) == [-9, 5, 6]
    assert gone(max_rows=3) == [-9, 4, 5, 6]
    assert gone(max_rows=3, max_age=2) == [3, 4, 5, 6]
    assert table.num_rows == 7


def test_victims_of_many_rows_equal_a_full_sort() -> None:
    generator, spec = np.random.default_rng(0), build("sgd")
    records = np.zeros(4000, dtype=record_dtype(spec))
    records["key"] = generator.permutation(4000) - 2000
    records["last_seen"], records["count"] = generator.integers(0, 5, 4000), generator.integers(1, 4, 4000)
    table = Table(spec)
    table.load_records(records)
    order = sorted(records, key=lambda r: (-int(r["count"]), -int(r["last_seen"]), int(r["key"])))
    expected = sorted(int(r["key"]) for r in order[1234:])
    assert table.victims(Eviction(max_rows=1234), clock=9).tolist() == expected


def test_old_candidates_are_victims_of_age() -> None:
    table = Table(build("sgd", admit_after=2))
    table.push(np.array([1, 2]), lines(2), clock=0)
    table.push(np.array([2]), lines(1), clock=9)
    assert table.victims(Eviction(max_age=5), clock=9).tolist() == [1]
    assert table.victims(Eviction(min_count=5, max_rows=1), clock=9).tolist() == [2]


def test_hot_rows() -> None:
    table = Table(build("sgd"))
    for keys in ([4, 2, 9], [4, 2], [4]):
        table.push(np.array(keys), lines(len(keys)))
    keys, counts = table.hot(2)
    assert (keys.tolist(), counts.tolist()) == ([4, 2], [3, 2])
    assert table.hot(10)[0].tolist() == [4, 2, 9]
    assert table.hot(0)[0].size == 0


def test_a_full_table_changes_nothing() -> None:
    table = Table(build("sgd"), reserve_rows=100)
    table.push(np.arange(90), lines(90), clock=1)
    before = table.records(0, 100).tobytes()
    with pytest.raises(TableError, match="full"):
        table.push(np.arange(80, 120), lines(40), clock=2)
    assert table.records(0, 100).tobytes() == before
    table.push(np.tile(np.arange(80, 100), 3), lines(60), clock=2)
    assert table.num_rows == 100
    table.delete(np.arange(50))
    table.push(np.arange(200, 250), lines(50))
    assert (table.num_rows, table.num_slots) == (100, 100)


def test_mapped_rows_lie_in_a_nameless_file(tmp_path: Path) -> None:
    spec = build("adam", dim=64, tier="mapped")
    mapped, plain = Table(spec, folder=tmp_path), Table(build("adam", dim=64))
    keys = np.arange(100_000)
    descriptors = len(os.listdir("/proc/self/fd"))
    for seed in range(2):
        for table in (mapped, plain):
            table.push(keys, lines(100_000, 64, seed=seed), clock=seed)
    np.testing.assert_array_equal(rows_of(mapped, keys), rows_of(plain, keys))
    assert list(tmp_path.iterdir()) == []
    del mapped, table
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_a_full_disk_is_an_error_not_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(build("adam", dim=64, tier="mapped"), folder=tmp_path)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TableError, match="No space left"):
        table.push(np.arange(100_000), lines(100_000, 64))


def test_inputs_of_other_layouts() -> None:
    table = Table(build("sgd"))
    keys = np.frombuffer(np.arange(6, dtype=np.int64).tobytes(), dtype=np.int64)  # read-only
    table.push(keys, lines(6)[:, ::-1])
    unaligned = np.frombuffer(b"1234" + keys.tobytes(), dtype=np.int64, offset=4)
    np.testing.assert_array_equal(rows_of(table, unaligned), rows_of(table, keys.copy()))
    with pytest.raises(TableError, match="float32"):
        table.pull(keys, np.empty((6, 5)))
    with pytest.raises(TableError, match="columns"):
        table.push(keys, lines(5))
    with pytest.raises(TableError, match="dimensions"):
        table.slots(keys[None])
    with pytest.raises(TableError, match="layout"):
        table.load_records(Table(build("adam")).records(0, 0))
    with pytest.raises(TableError, match="folder"):
        Table(build(tier="mapped"))


def test_empty_calls() -> None:
    table, none = Table(build()), np.empty(0, dtype=np.int64)
    table.push(none, lines(0))
    table.add(none, lines(0))
    table.pull(none, lines(0))
    assert table.assign(none, lines(0), only_absent=True) == 0
    assert (table.delete(none), table.slots(none).size, len(table.records(0, 0))) == (0, 0, 0)
    assert table.victims(Eviction(max_age=1, max_rows=1), clock=3).size == 0


def test_counts_stop_at_their_largest() -> None:
    spec = build("sgd")
    records = np.zeros(1, dtype=record_dtype(spec))
    records["count"] = 2**31 - 1
    table = Table(spec)
    table.load_records(records)
    table.push(np.array([0]), lines(1), clock=2**32 - 1)
    assert table.records(0, 1)[["last_seen", "count"]].tolist() == [(2**32 - 1, 2**31 - 1)]
