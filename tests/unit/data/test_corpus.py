"""Tokenised once, found again, never trusted when damaged, safe when two build at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError
from weft.data import Corpus, Loader, default_cache_dir, open_corpus
from weft.data import corpus as corpus_module
from weft.data.building import Silent, build_store
from weft.data.byte_tokenizer import ByteTokenizer
from weft.data.documents import Document
from weft.data.rows import RowLayout
from weft.data.store import HEADER_BYTES, DamagedStoreError, StoreHeader, open_store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i + 1))
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time the documents are read."""
    seen: list[int] = []
    original = corpus_module.iterate_documents

    def counted(sources: Any) -> Iterator[Document]:
        seen.append(len(sources))
        return original(sources)

    monkeypatch.setattr(corpus_module, "iterate_documents", counted)
    return seen


def spec_of(source: Path, **changes: Any) -> DataSpec:
    return DataSpec(source=str(source), **changes)


def stream(corpus: Corpus) -> bytes:
    """The whole training stream as text, the end of each document shown as '|'."""
    tokens = corpus.training.read(np.array([0]), length=corpus.training.num_tokens)[0]
    return bytes(np.where(tokens == corpus.end_of_document, ord("|"), tokens).astype(np.uint8))


def test_the_stream_is_the_documents_each_with_its_end(source: Path, tmp_path: Path) -> None:
    corpus = open_corpus(spec_of(source, eval_fraction=0), cache_dir=tmp_path / "cache")
    texts = [path.read_bytes() for path in sorted(source.iterdir())]
    assert stream(corpus) == b"".join(text + b"|" for text in texts)
    assert (corpus.num_documents, corpus.vocab_size, corpus.end_of_document) == (40, 257, 256)
    assert corpus.num_tokens == corpus.training.num_tokens == sum(len(text) + 1 for text in texts)
    assert corpus.training.tokens.dtype == np.uint16
    assert corpus.evaluation is None


def test_held_out_documents_are_not_trained_on(source: Path, tmp_path: Path, reads: list[int]) -> None:
    corpus = open_corpus(spec_of(source, eval_fraction=0.2), cache_dir=tmp_path / "cache")
    assert corpus.evaluation is not None
    assert corpus.training.num_documents + corpus.evaluation.num_documents == 40
    assert corpus.training.num_tokens + corpus.evaluation.num_tokens == corpus.num_tokens
    other = open_corpus(spec_of(source, eval_fraction=0.5), cache_dir=tmp_path / "cache")
    assert other.path == corpus.path
    assert len(reads) == 1  # another split is no reason to tokenise again
    held_out = Loader(
        corpus.evaluation, seed=0, global_batch=2, layout=RowLayout(sequence_length=8), epochs=1, shuffle=False
    )
    assert held_out.batch(0)["input_ids"].shape == (2, 8)


def test_the_second_open_reads_no_source(source: Path, tmp_path: Path, reads: list[int]) -> None:
    first = open_corpus(spec_of(source), cache_dir=tmp_path / "cache")
    second = open_corpus(spec_of(source), cache_dir=str(tmp_path / "cache"))
    assert len(reads) == 1
    assert stream(first) == stream(second)
    (source / "00.txt").write_text("changed, so tokenised again")
    third = open_corpus(spec_of(source), cache_dir=tmp_path / "cache")
    assert len(reads) == 2
    assert third.path != first.path
    assert stream(third) != stream(first)


def test_a_hugging_face_tokenizer_is_loaded_only_to_build(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    (tmp_path / "a.txt").write_text("one two")
    spec = spec_of(tmp_path / "a.txt", tokenizer=str(tokenizer_folder))
    corpus = open_corpus(spec, cache_dir=tmp_path / "cache")
    assert corpus.training.read(np.array([0]), length=3).tolist() == [[2, 3, 1]]
    assert (corpus.vocab_size, corpus.end_of_document) == (6, 1)
    assert open_corpus(spec_of(tmp_path / "a.txt"), cache_dir=tmp_path / "cache").path != corpus.path
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    assert open_corpus(spec, cache_dir=tmp_path / "cache").vocab_size == 6


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        end_of_document = 69_999

    build_store(tmp_path / "wide.bin", ["ab", "c"], tokenizer=Wide(), key="k")
    store = open_store(tmp_path / "wide.bin", key="k")
    assert store.tokens.dtype == np.uint32
    assert store.tokens.tolist() == [97, 98, 69_999, 99, 69_999]
    assert store.offsets.tolist() == [0, 3, 5]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def alter_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"num_documents": 40', b'"num_documents": 39', 1))


def alter_end_of_document(path: Path) -> None:
    """The size stays right; only the header's own digest can tell."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"end_of_document": 256', b'"end_of_document": 255', 1))


def alter_offsets(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-24] ^= 1
    path.write_bytes(bytes(data))


def zero_header(path: Path) -> None:
    path.write_bytes(bytes(HEADER_BYTES) + path.read_bytes()[HEADER_BYTES:])


def another_version(path: Path) -> None:
    data = path.read_bytes()
    header = StoreHeader.from_bytes(data[:HEADER_BYTES])
    newer = StoreHeader(**{**vars(header), "format_version": header.format_version + 1})
    path.write_bytes(newer.to_bytes() + data[HEADER_BYTES:])


@pytest.mark.parametrize(
    "damage",
    [truncate, lengthen, empty, alter_header, alter_end_of_document, alter_offsets, zero_header, another_version],
)
def test_a_damaged_cache_is_built_again(
    source: Path, tmp_path: Path, reads: list[int], damage: Callable[[Path], None]
) -> None:
    good = open_corpus(spec_of(source), cache_dir=tmp_path / "cache")
    wanted, path = stream(good), good.path
    key = path.stem.removeprefix("tokens-")
    damage(path)
    with pytest.raises(DamagedStoreError):
        open_store(path, key=key)
    assert stream(open_corpus(spec_of(source), cache_dir=tmp_path / "cache")) == wanted
    assert len(reads) == 2
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_a_store_of_other_data_is_not_taken(tmp_path: Path) -> None:
    build_store(tmp_path / "a.bin", ["x"], tokenizer=ByteTokenizer(), key="one")
    with pytest.raises(DamagedStoreError, match="other data"):
        open_store(tmp_path / "a.bin", key="two")


def test_a_failed_build_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (source / "99.jsonl").write_text("{broken")
    with pytest.raises(DataError, match=r"99\.jsonl:1"):
        open_corpus(spec_of(source), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_parts_of_data_that_changed_long_ago_go(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old, recent = cache / "tokens-a.parts", cache / "tokens-b.parts"
    for folder in (old, recent):
        folder.mkdir(parents=True)
        (folder / "000000").write_bytes(b"x")
    os.utime(old, (0, 0))
    open_corpus(spec_of(source), cache_dir=cache)
    assert [folder.exists() for folder in (old, recent)] == [False, True]


def test_of_two_at_once_one_reads_and_the_other_waits_for_its_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    """The first may finish only when the second waits."""
    waits = threading.Event()
    original = corpus_module.iterate_documents

    def read_slowly(sources: Any) -> Iterator[Document]:
        yield from original(sources)
        assert waits.wait(timeout=60)

    class Waiting(Silent):
        def wait_for(self, owner: str) -> None:
            if owner.startswith(f"pid {os.getpid()} on "):  # the lock is there a moment before its owner's name
                waits.set()

    monkeypatch.setattr(corpus_module, "iterate_documents", read_slowly)
    streams: list[bytes] = []

    def build() -> None:
        streams.append(stream(open_corpus(spec_of(source), cache_dir=tmp_path / "cache", progress=Waiting())))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(streams) == 2
    assert streams[0] == streams[1]
    assert len(reads) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_empty_source(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="has no text"):
        open_corpus(spec_of(tmp_path / "empty.txt"), cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written") as caught:
        open_corpus(spec_of(source), cache_dir=tmp_path / "file")
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_the_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/weft")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/person")
    assert default_cache_dir() == Path("/home/person/.cache/weft")
