"""A store is built from parts: the same file serially, in processes, and after a kill, which loses nothing finished."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import TEXT, make_tokenizer

from weft.core.errors import RunError, error_from_dict
from weft.data import building, encode_pool, parts
from weft.data.building import build_store
from weft.data.byte_tokenizer import ByteTokenizer, TokenArray
from weft.data.documents import Document
from weft.data.encode_pool import EncodeTask
from weft.data.encode_worker import _carry_out
from weft.data.store import open_store
from weft.data.tokenizers import Tokenizer, open_tokenizer

DOCUMENTS: list[Document] = [f"{number} {TEXT[number % len(TEXT)]}" for number in range(60)]


class Watched(ByteTokenizer):
    """Counts what it encodes; dies as a process does at document `dies_at`."""

    def __init__(self, *, dies_at: int | None = None) -> None:
        self.sizes: list[int] = []
        self.dies_at = dies_at

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]:
        if self.dies_at is not None and sum(self.sizes) + len(documents) > self.dies_at:
            raise KeyboardInterrupt
        self.sizes.append(len(documents))
        return super().encode_batch(documents)


class Advance(building.Silent):
    def __init__(self) -> None:
        self.done = 0

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 7)


def serial_bytes(folder: Path, documents: list[Document], tokenizer: Tokenizer) -> bytes:
    folder.mkdir()
    build_store(folder / "a.bin", documents, tokenizer=tokenizer, key="k")
    return (folder / "a.bin").read_bytes()


def test_parts_are_a_function_of_the_documents_and_batches_bound_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_CHARACTERS", 20)
    monkeypatch.setattr(parts, "BATCH_DOCUMENTS", 3)
    documents: list[Document] = ["x" * 6] * 4 + ["x"] * 4
    assert [len(group) for group in parts.divide(documents)] == [4, 4]
    tokenizer = Watched()
    build_store(tmp_path / "a.bin", documents, tokenizer=tokenizer, key="k")
    assert tokenizer.sizes == [3, 1, 3, 1]
    assert open_store(tmp_path / "a.bin", key="k").offsets.tolist() == [0, 7, 14, 21, 28, 30, 32, 34, 36]


@pytest.mark.usefixtures("small_parts")
def test_after_a_kill_only_what_is_missing_is_encoded(tmp_path: Path) -> None:
    whole = serial_bytes(tmp_path / "whole", DOCUMENTS, ByteTokenizer())
    path, dying = tmp_path / "a.bin", Watched(dies_at=30)
    with pytest.raises(KeyboardInterrupt):
        build_store(path, DOCUMENTS, tokenizer=dying, key="k")
    assert sum(dying.sizes) == 28  # four parts of seven
    kept = sorted((tmp_path / "a.parts").iterdir())
    assert [file.name for file in kept] == ["000000", "000001", "000002", "000003"]
    kept[1].write_bytes(kept[1].read_bytes()[:-2])  # a part that a power cut damaged
    again, progress = Watched(), Advance()
    build_store(path, DOCUMENTS, tokenizer=again, key="k", progress=progress)
    assert sum(again.sizes) == 60 - 28 + 7
    assert progress.done == sum(map(len, DOCUMENTS))
    assert path.read_bytes() == whole
    assert not (tmp_path / "a.parts").exists()


@pytest.mark.usefixtures("small_parts")
def test_parts_of_other_documents_or_another_key_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(KeyboardInterrupt):
        build_store(path, DOCUMENTS, tokenizer=Watched(dies_at=30), key="k")
    changed: list[Document] = ["other", *DOCUMENTS[1:]]
    tokenizer = Watched()
    build_store(path, changed, tokenizer=tokenizer, key="k")
    assert sum(tokenizer.sizes) == 60 - 21
    with pytest.raises(KeyboardInterrupt):
        build_store(path, DOCUMENTS, tokenizer=Watched(dies_at=30), key="k")
    build_store(path, DOCUMENTS, tokenizer=(other := Watched()), key="other")
    assert sum(other.sizes) == 60


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_processes_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "tokenizer", "bpe-bos")))
    whole = serial_bytes(tmp_path / "whole", DOCUMENTS, tokenizer)
    here: list[int] = []
    monkeypatch.setattr(parts, "encode_part", lambda *_, **__: here.append(1))  # in this process: never
    build_store(tmp_path / "a.bin", DOCUMENTS, tokenizer=tokenizer, key="k", num_workers=2)
    assert (tmp_path / "a.bin").read_bytes() == whole
    assert here == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["bpe-bos", "unigram"])
def test_what_processes_carry_out_gives_the_same_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above without the seconds that processes take to start: tasks are pickled, and carried out in threads."""
    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "tokenizer", kind)))
    whole = serial_bytes(tmp_path / "whole", DOCUMENTS, tokenizer)
    names: list[str] = []

    def ask(_: object, task: EncodeTask) -> None:
        names.append(task.path.name)
        assert _carry_out(pickle.loads(pickle.dumps(task)), tokenizer=tokenizer, key="k") == {}

    monkeypatch.setattr(encode_pool, "COMMAND", ("sleep", "60"))
    monkeypatch.setattr(encode_pool, "_ask", ask)
    build_store(tmp_path / "a.bin", DOCUMENTS, tokenizer=tokenizer, key="k", num_workers=3)
    assert (tmp_path / "a.bin").read_bytes() == whole
    assert sorted(names) == [f"{index:06d}" for index in range(9)]


@pytest.mark.usefixtures("small_parts")
def test_a_process_that_is_killed_ends_the_build_and_leaves_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "tokenizer", "bpe")))
    monkeypatch.setattr(encode_pool, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(RunError, match="ended unexpectedly") as caught:
        build_store(tmp_path / "a.bin", DOCUMENTS, tokenizer=tokenizer, key="k", num_workers=2)
    assert "run again" in caught.value.hint
    assert (tmp_path / "a.parts").is_dir()


@pytest.mark.usefixtures("small_parts")
def test_an_error_in_the_data_ends_the_processes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    original = encode_pool._start
    monkeypatch.setattr(encode_pool, "_start", lambda *given: started.append(original(*given)) or started[-1])
    monkeypatch.setattr(encode_pool, "COMMAND", ("sleep", "60"))
    monkeypatch.setattr(encode_pool, "_ask", lambda *_: None)

    def documents() -> Iterator[Document]:
        yield from DOCUMENTS
        raise ZeroDivisionError

    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "tokenizer", "bpe")))
    with pytest.raises(ZeroDivisionError):
        build_store(tmp_path / "a.bin", documents(), tokenizer=tokenizer, key="k", num_workers=2)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_an_error_of_a_process_is_the_builders_own(tmp_path: Path) -> None:
    class Broken(ByteTokenizer):
        def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]:
            raise ValueError("no such word")

    task = EncodeTask(path=tmp_path / "000000", documents=["x"], documents_crc32=0)
    error = error_from_dict(_carry_out(task, tokenizer=Broken(), key="k"))
    assert (type(error), error.message) == (RunError, "tokenising failed: ValueError: no such word")


def test_workers_are_as_many_as_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8}, raising=False)
    assert building.count_workers() == 3


def test_rows_of_a_dataset_come_in_the_same_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")
    from weft.core.data_spec import DataSpec
    from weft.data import open_corpus

    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(tmp_path / "rows"))
    spec = DataSpec(source=f"hf:{tmp_path / 'rows'}")
    whole = open_corpus(spec, cache_dir=tmp_path / "whole").path.read_bytes()
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 7)
    assert open_corpus(spec, cache_dir=tmp_path / "parted").path.read_bytes() == whole
