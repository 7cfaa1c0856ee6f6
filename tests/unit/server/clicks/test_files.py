"""Files in the Criteo layout: CSV, TSV, parquet give the same samples; a bad file gives one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from weft.core.errors import DataError, MissingExtraError
from weft.server.clicks.files import read_file
from weft.server.clicks.samples import ClickBatch, field_keys, text_values
from weft.server.clicks.store import StoredClicks, store_files

ROWS = [
    ["1", "3", "", "68fd1e64", "a"],
    ["0", "-1", "250", "", "a much longer value than eight bytes"],
    ["0", "0", "1", "a", "68fd1e64"],
]
HEADER = ["label", "I1", "I2", "C1", "C2"]


def _read(path: Path) -> ClickBatch:
    return next(read_file(path, numeric=2, categorical=2))


def _write(path: Path, rows: list[list[str]], separator: str) -> Path:
    path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_separators_headers_and_column_order_do_not_change_the_samples(tmp_path: Path) -> None:
    plain = _read(_write(tmp_path / "a.tsv", ROWS, "\t"))
    comma = _read(_write(tmp_path / "b.csv", ROWS, ","))
    turned = [[*row[::-1], "ignored"] for row in [HEADER, *ROWS]]
    named = _read(_write(tmp_path / "c.csv", turned, ","))
    for other in (comma, named):
        np.testing.assert_array_equal(plain.keys, other.keys)
        np.testing.assert_array_equal(plain.numeric, other.numeric)
        np.testing.assert_array_equal(plain.labels, [1, 0, 0])
    np.testing.assert_allclose(plain.numeric, [[np.log(4), 0], [-np.log(2), np.log(251)], [0, np.log(2)]], rtol=1e-6)


def test_parquet_gives_the_same_samples(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    columns = list(zip(*ROWS, strict=True))
    table = pa.table(
        {
            "label": [int(value) for value in columns[0]],
            "I1": [float(value) if value else None for value in columns[1]],
            "I2": [float(value) if value else None for value in columns[2]],
            "C1": [value or None for value in columns[3]],
            "C2": list(columns[4]),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    wanted, found = _read(_write(tmp_path / "a.tsv", ROWS, "\t")), _read(tmp_path / "a.parquet")
    np.testing.assert_array_equal(wanted.keys, found.keys)
    np.testing.assert_array_equal(wanted.numeric, found.numeric)


def test_a_key_is_of_field_and_value_and_not_of_its_neighbours() -> None:
    values = text_values([b"a", b"a" * 8, b"a" * 30, b""])
    assert len(set(values.tolist())) == 4
    assert text_values([b"a"])[0] == values[0]
    keys = field_keys(np.array([[7, 7]], dtype=np.uint64))
    assert keys[0, 0] != keys[0, 1]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([["1", "2", "3", "x"]], "line 1 has 4 fields and not 5"),
        ([["1", "2", "3", "x", "y"], ["0", "two", "3", "x", "y"]], "line 2: I1 is 'two', not a number"),
        ([["2", "2", "3", "x", "y"]], "line 1: the label is not 0 or 1"),
        ([["label", "I1", "C1", "C2"]], "has no column 'I2'"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, rows: list[list[str]], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        _read(_write(tmp_path / "bad.csv", rows, ","))
    assert caught.value.hint


def test_a_missing_file_and_a_parquet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        _read(tmp_path / "none.csv")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        _read(tmp_path / "bad.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(MissingExtraError, match="need the pyarrow library"):
        _read(tmp_path / "a.parquet")


def test_the_store_holds_all_files_in_order_and_is_read_by_number(tmp_path: Path) -> None:
    first, second = (_write(tmp_path / name, ROWS, "\t") for name in ("a.tsv", "b.tsv"))
    store_files([first, second], tmp_path / "store", numeric=2, categorical=2)
    log = StoredClicks(tmp_path / "store")
    assert log.num_samples == 6
    np.testing.assert_array_equal(log.read(np.array([4, 0])).keys, _read(first).keys[[1, 0]])
    with pytest.raises(DataError, match="holds no samples"):
        StoredClicks(tmp_path / "nowhere")


def test_empty_files_have_no_samples(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(DataError, match="no samples"):
        store_files([tmp_path / "a.csv"], tmp_path / "store", numeric=2, categorical=2)
