"""Every kind of source gives its documents in a fixed order, and every mistake is one sentence with a hint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError, MissingExtraError
from weft.data import documents as documents_module
from weft.data.sources import StdlibSource, iterate_documents, open_sources


def read(source: str | Path | list[str], **changes: Any) -> list[str | bytes]:
    named = source if isinstance(source, list) else str(source)
    return list(iterate_documents(open_sources(DataSpec(source=named, **changes))))


def identity(source: str | Path, **changes: Any) -> list[Any]:
    return [one.identity() for one in open_sources(DataSpec(source=str(source), **changes))]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/y.py", "c.csv", ".hidden/x.txt", "a/.x.txt", "empty.txt"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    return tmp_path / "tree"


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


# Files, folders, globs


def test_a_folder_is_walked_in_sorted_order_without_hidden_unknown_and_empty_files(tree: Path) -> None:
    assert read(tree) == [b"a/y.py", b"a/z.md", b"b.txt"]


def test_a_glob_and_a_list_keep_their_order(tree: Path) -> None:
    assert read(f"{tree}/**/*.md") == [b"a/z.md"]
    assert read(f"{tree}/**") == [b"a/y.py", b"a/z.md", b"b.txt"]
    assert read([f"{tree}/b.txt", f"{tree}/a"]) == [b"b.txt", b"a/y.py", b"a/z.md"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "odd[1].txt").write_text("odd")
    assert read(tmp_path / "odd[1].txt") == [b"odd"]


def test_a_large_text_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 10)
    text = "".join(f"zeile {i} ü\n" for i in range(9)).encode()
    (tmp_path / "big.txt").write_bytes(text)
    pieces = read(tmp_path / "big.txt")
    assert len(pieces) > 3
    assert all(isinstance(piece, bytes) and piece.endswith(b"\n") for piece in pieces)
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == text


def test_identity_changes_with_the_files(tree: Path) -> None:
    before = identity(tree)
    assert identity(tree) == before
    (tree / "b.txt").write_text("longer than before")
    longer = identity(tree)
    os.utime(tree / "b.txt", ns=(1, 1))
    touched = identity(tree)
    (tree / "new.txt").write_text("x")
    assert len({str(one) for one in (before, longer, touched, identity(tree))}) == 4
    assert identity(tree, text_field="body") != identity(tree)


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("absent.txt", "there is no file, folder or glob match", "check the path"),
        ("python-stdlb", "there is no file", "did you mean 'python-stdlib'?"),
        ("absent/*.txt", "there is no file, folder or glob match", "check the path"),
        ("", "is empty", "python-stdlib"),
        ([], "is empty", "python-stdlib"),
    ],
)
def test_a_source_that_leads_nowhere(source: str | list[str], message: str, hint: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(source)
    assert hint in caught.value.hint


def test_unknown_kinds(tree: Path) -> None:
    with pytest.raises(DataError, match=r"unknown suffix \(.csv\)") as caught:
        read(tree / "c.csv")
    assert ".jsonl .md .parquet .py .txt" in caught.value.hint
    with pytest.raises(DataError, match="no file with a known suffix"):
        read(f"{tree}/*.csv")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    sources = open_sources(DataSpec(source=str(tmp_path / "a.txt")))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        list(iterate_documents(sources))
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        sources[0].identity()


# JSONL


def test_jsonl(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("rows.jsonl", [{"text": "é one"}, {"text": None}, {"text": ""}, {"text": "two", "id": 3}])
    path.write_text(path.read_text() + "\n  \n")
    assert read(path) == ["é one", "two"]
    other = write_jsonl("other.JSONL", [{"body": "b"}])
    assert read(other, text_field="body") == ["b"]


@pytest.mark.parametrize(
    ("second_line", "message", "hint"),
    [
        (b"{broken", r"rows.jsonl:2 is not JSON", "one JSON object per line"),
        (b'{"text": "\xff"}', r"rows.jsonl:2 is not JSON", "one JSON object per line"),
        (b"[1, 2]", r"rows.jsonl:2 is a JSON list, not an object", "one JSON object per line"),
        (b'{"id": 1, "body": ""}', r"rows.jsonl:2: there is no field 'text'", "one of: body, id"),
        (b'{"text": 5}', r"rows.jsonl:2: field 'text' is int, not text", "text_field"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, second_line: bytes, message: str, hint: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n' + second_line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / "rows.jsonl")
    assert hint in caught.value.hint


# Parquet


def test_parquet_is_streamed_in_row_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PARQUET_ROWS", 7)
    rows = [f"row {i}" for i in range(50)]
    path = write_parquet(tmp_path / "t.parquet", {"id": list(range(51)), "text": [*rows, None]})
    assert read(path) == rows


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", {"id": [1, 2], "body": ["a", "b"]})
    with pytest.raises(DataError, match=r"t\.parquet: there is no field 'text'") as caught:
        read(path)
    assert "id, body" in caught.value.hint
    with pytest.raises(DataError, match="row 1: field 'id' is int"):
        read(path, text_field="id")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"broken\.parquet is not a readable parquet file"):
        read(tmp_path / "broken.parquet")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow") as caught:
        read(tmp_path / "t.parquet")
    assert caught.value.hint == "pip install 'weft-train[data]'"


# The standard library


def test_the_standard_library_is_real_text_without_tests() -> None:
    (source,) = open_sources(DataSpec())
    texts = list(iterate_documents([source]))
    num_bytes = sum(len(text) for text in texts)
    assert 5_000_000 < num_bytes < 30_000_000
    assert len(texts) > 300
    root = Path(os.__file__).resolve().parent
    paths = [Path(entry[0]) for entry in source.identity()[1]]
    # some systems keep one file of it elsewhere, behind a link
    names = [path.relative_to(root).parts for path in paths if path.is_relative_to(root)]
    assert len(names) >= len(paths) - 1
    assert ("json", "decoder.py") in names
    assert names == sorted(names, key="/".join)
    assert not {"test", "tests", "idle_test", "site-packages", "__pycache__"} & {
        part for name in names for part in name
    }


def test_the_standard_library_survives_odd_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"latin \xe9\n")
    (tmp_path / "b.py").symlink_to(tmp_path / "absent.py")
    (tmp_path / "c.py").write_text("fine")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "d.py").write_text("left out")
    source = StdlibSource(root=tmp_path)
    assert list(source.documents()) == [b"latin \xe9\n", b"fine"]
    assert len(source.identity()[1]) == 2


def test_a_python_without_its_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no standard-library sources"):
        list(StdlibSource(root=tmp_path / "absent").documents())


# Datasets of the Hugging Face library


@pytest.fixture
def saved_dataset(tmp_path: Path) -> Path:
    from datasets import Dataset

    rows = [f"row {i}" for i in range(5)]
    Dataset.from_dict({"text": [*rows, None], "id": list(range(6))}).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_dataset(saved_dataset: Path) -> None:
    assert read(f"hf:{saved_dataset}") == [f"row {i}" for i in range(5)]
    before = identity(f"hf:{saved_dataset}")
    assert identity(f"hf:{saved_dataset}") == before
    os.utime(saved_dataset / "state.json", ns=(1, 1))
    assert identity(f"hf:{saved_dataset}") != before


def test_a_saved_dataset_with_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "extra")}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert read(f"hf:{tmp_path}/saved") == ["train"]
    assert read(f"hf:{tmp_path}/saved", split="extra") == ["extra"]
    with pytest.raises(DataError, match="has no split 'test'") as caught:
        read(f"hf:{tmp_path}/saved", split="test")
    assert "extra, train" in caught.value.hint


def test_a_folder_that_the_library_loads(
    write_jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    write_jsonl("folder/train.jsonl", [{"text": "one"}, {"text": "two"}])
    assert read(f"hf:{tmp_path}/folder") == ["one", "two"]
    with pytest.raises(DataError, match=r"\(split 'absent'\) cannot be loaded"):
        read(f"hf:{tmp_path}/folder", split="absent")


def test_a_hub_name_is_identified_by_its_tables(saved_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    loaded = datasets.load_from_disk(str(saved_dataset))
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str, keep_in_memory: bool) -> datasets.Dataset:
        asked.append((name, split))
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (source,) = open_sources(DataSpec(source="hf:owner/rows", split="train"))
    (table,) = source.identity()[-1]
    assert table[0].endswith(".arrow")
    assert len(list(source.documents())) == 6
    assert asked == [("owner/rows", "train")]


def test_dataset_mistakes(saved_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    with pytest.raises(DataError, match="there is no field 'body'") as caught:
        read(f"hf:{saved_dataset}", text_field="body")
    assert "text, id" in caught.value.hint
    with pytest.raises(DataError, match="row 1: field 'id' is int"):
        read(f"hf:{saved_dataset}", text_field="id")
    with pytest.raises(DataError, match="there is no dataset folder"):
        read("hf:./absent")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"cannot be loaded: no network$"):
        read("hf:owner/absent")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="datasets") as missing:
        read(f"hf:{saved_dataset}")
    assert missing.value.hint == "pip install 'weft-train[data]'"
