"""Streaming: every document once per epoch, an order of seed and samples alone, exact continuation, bounded stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.data_spec import DataSpec
from weft.core.errors import BadValueError, DataError
from weft.core.run_spec import RunSpec
from weft.data import open_corpus
from weft.data.document_stream import Cursor, DocumentStream
from weft.data.rows import IGNORED
from weft.data.sources import open_sources
from weft.data.streaming import StreamingLoader

DOCUMENTS, WINDOW = 23, 5
Make = Callable[..., StreamingLoader]


def texts() -> list[str]:
    return [f"{chr(65 + number)}" * (3 + number % 4) for number in range(DOCUMENTS)]


@pytest.fixture(params=["jsonl", "parquet", "dataset", "text"])
def source(request: pytest.FixtureRequest, tmp_path: Path, write_jsonl: Any) -> str:
    rows = [{"text": text} for text in texts()]
    if request.param == "jsonl":
        for at, part in enumerate((rows[:9], rows[9:])):
            write_jsonl(f"shards/{at}.jsonl", part) if (tmp_path / "shards").mkdir(exist_ok=True) is None else None
        return str(tmp_path / "shards")
    if request.param == "text":
        (tmp_path / "texts").mkdir()
        for at, text in enumerate(texts()):
            (tmp_path / "texts" / f"{at:02d}.txt").write_text(text)
        return str(tmp_path / "texts")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows)
    if request.param == "parquet":
        table.to_parquet(tmp_path / "rows.parquet", batch_size=4)
        return str(tmp_path / "rows.parquet")
    (tmp_path / "hub").mkdir()
    table.to_parquet(tmp_path / "hub" / "train.parquet")
    return f"hf:{tmp_path / 'hub'}"


def spec_of(source: str, **keys: Any) -> DataSpec:
    given = {"sequence_length": 8, "packing": "none", "eval_fraction": 0, "streaming": True, "shuffle_window": WINDOW}
    return DataSpec(source=source, **{**given, **keys})


def loader(spec: DataSpec, tmp_path: Path, **changes: Any) -> StreamingLoader:
    return StreamingLoader(spec, cache_dir=tmp_path / "cache", **{"seed": 1, "global_batch": 1, **changes})


def first_letters(stream: StreamingLoader, begin: int, end: int) -> list[str]:
    return [chr(int(stream.batch(position)["input_ids"][0, 0])) for position in range(begin, end)]


def test_an_epoch_has_every_document_once_window_by_window(source: str, tmp_path: Path) -> None:
    stream = loader(spec_of(source, epochs=2), tmp_path)
    seen = first_letters(stream, 0, 2 * DOCUMENTS)
    letters = [text[0] for text in texts()]
    for epoch in (seen[:DOCUMENTS], seen[DOCUMENTS:]):
        for begin in range(0, DOCUMENTS, WINDOW):
            assert sorted(epoch[begin : begin + WINDOW]) == letters[begin : begin + WINDOW]
    assert seen[:DOCUMENTS] != seen[DOCUMENTS:]
    assert not stream.has_batch(2 * DOCUMENTS)
    assert stream.epochs(DOCUMENTS) == {"data": 1.0}
    assert len(list((tmp_path / "cache").glob("tokens-*.bin"))) < 2 * DOCUMENTS // WINDOW - 3  # passed ones are deleted


@pytest.mark.parametrize("packing", ["none", "documents", "concatenate"])
def test_a_state_continues_exactly_and_ranks_share_the_order(packing: str, tmp_path: Path, write_jsonl: Any) -> None:
    path = write_jsonl("rows.jsonl", [{"text": text} for text in texts()])
    spec = spec_of(str(path), packing=packing, epochs=2)
    whole = loader(spec, tmp_path)
    rows = []
    while whole.has_batch(len(rows)):
        state = whole.state(len(rows))
        rows.append((state, whole.batch(len(rows))))
    assert len(rows) > 6
    for position in range(0, len(rows), 3):
        resumed = loader(spec, tmp_path)
        resumed.restore(json.loads(json.dumps(rows[position][0])))
        assert [one.number for one in resumed._windows] == [rows[position][0]["number"]]  # nothing before it is read
        for at in range(position, min(position + 5, len(rows))):
            assert all(np.array_equal(resumed.batch(at)[key], value) for key, value in rows[at][1].items())
    ranks = [loader(spec, tmp_path, global_batch=4, dp_rank=rank, dp_degree=2) for rank in (0, 1)]
    for position in range(0, len(rows), 4):
        batches = [rank.batch(position)["input_ids"] for rank in ranks]
        labels = np.concatenate([rank.batch(position)["labels"] for rank in ranks])
        joined = np.concatenate(batches)
        for row, sample in enumerate(ranks[0].samples(position).tolist()):
            if sample < len(rows):
                assert np.array_equal(joined[row], rows[sample][1]["input_ids"][0])
            else:
                assert (labels[row] == IGNORED).all()
    assert not any(rank.has_batch(len(rows)) for rank in ranks)


def test_only_what_is_needed_is_read(tmp_path: Path, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl("rows.jsonl", [{"text": text} for text in texts()])
    made: list[str] = []
    original = DocumentStream.window

    def window(self: DocumentStream, cursor: Cursor, size: int) -> Any:
        makes, after = original(self, cursor, size)
        return [lambda make=make: made.append("x") or make() for make in makes], after

    monkeypatch.setattr(DocumentStream, "window", window)
    stream = loader(spec_of(str(path)), tmp_path)
    assert len(made) <= WINDOW
    stream.batch(3 * WINDOW)
    assert len(made) <= 4 * WINDOW


def test_cursors_continue_in_the_middle_of_files(source: str) -> None:
    stream = DocumentStream(open_sources(spec_of(source)))
    everything = [(make(), after) for make, after in stream.read(Cursor())]
    assert [text if isinstance(text, str) else text.decode() for text, _ in everything] == texts()
    for at in (0, 7, 8, 9, DOCUMENTS - 1):
        rest = [make() for make, _ in stream.read(everything[at][1])]
        assert rest == [text for text, _ in everything[at + 1 :]]


def test_a_bad_row_of_a_later_window_names_its_line(tmp_path: Path, write_jsonl: Any) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 7 + [{"prompt": "a", "completion": ""}]
    path = write_jsonl("rows.jsonl", rows)
    stream = loader(spec_of(str(path), format="prompt-completion"), tmp_path)
    stream.batch(WINDOW - 1)
    with pytest.raises(DataError, match=r"rows.jsonl:8: completion is empty"):
        stream.batch(WINDOW)


def test_the_first_window_has_the_held_out_documents(tmp_path: Path, write_jsonl: Any) -> None:
    path = write_jsonl("rows.jsonl", [{"text": text} for text in texts()])
    spec = spec_of(str(path), eval_fraction=0.3, epochs=1)
    corpus = open_corpus(spec, cache_dir=tmp_path / "cache")
    assert corpus.evaluation is not None
    stream = loader(spec, tmp_path)
    held_out = corpus.evaluation.num_documents
    assert 0 < held_out < WINDOW
    assert stream.has_batch(DOCUMENTS - held_out - 1)
    assert not stream.has_batch(DOCUMENTS - held_out)


def test_streams_are_not_mixed() -> None:
    with pytest.raises(BadValueError, match=r"streaming is for one data\.source"):
        RunSpec.from_tables({"model": {"type": "llama"}, "data": {"streaming": True, "sources": [{"source": "a.txt"}]}})
