"""The index of a metrics file: equal to the file at every moment, as it grows, is cut, resumed or replaced."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.report.folder import read_folder
from weft.ui import index as indexes
from weft.ui.index import MetricsIndex, sample_rows
from weft.ui.rows import parse_rows


def line(step: int, **fields: Any) -> str:
    values = {"loss": 5 / step, "grad_norm": 1.0, "tokens": 10, "learning_rate": 1e-3, "step_s": 0.5}
    return json.dumps({"step": step, **values, **fields}) + "\n"


def read_all(index: MetricsIndex, *, limit: int = 200) -> None:
    while index.update(limit=limit):
        pass


@pytest.fixture
def index(tmp_path: Path) -> MetricsIndex:
    return MetricsIndex(tmp_path / "metrics.jsonl", tmp_path / "kept")


def test_a_growing_file_is_read_on_and_half_a_line_waits(index: MetricsIndex) -> None:
    text = "".join(line(step) for step in range(1, 8))
    index.source.write_text(text[:-5])
    read_all(index)
    rows, is_sampled = index.rows()
    assert rows["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert not is_sampled
    with index.source.open("a") as file:
        file.write(text[-5:] + line(8, eval_loss=2.5))
    read_all(index)
    rows, _ = index.rows()
    assert rows["step"].tolist() == list(range(1, 9))
    assert rows["tokens"].tolist() == [10 * step for step in range(1, 9)]
    assert rows["seconds"][-1] == 4.0
    assert rows["eval_loss"][-1] == 2.5
    assert np.isnan(rows["eval_loss"][:-1]).all()
    assert index.fields == {"loss", "grad_norm", "learning_rate", "step_s", "eval_loss"}


@given(steps=st.lists(st.integers(1, 12), min_size=1, max_size=30), limit=st.integers(90, 900))
def test_resumed_runs_are_read_as_the_report_reads_them(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], limit: int
) -> None:
    """Steps in any order: later attempts replace earlier ones, whatever the sizes of the reads."""
    folder = tmp_path_factory.mktemp("run")
    texts = [line(step, loss=float(place), tokens=step) for place, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("".join(texts))
    index = MetricsIndex(folder / "metrics.jsonl", folder / "kept")
    read_all(index, limit=max(limit, max(map(len, texts))))
    rows, _ = index.rows()
    kept = read_folder(folder).metrics.steps
    assert rows["step"].tolist() == [record.step for record in kept]
    assert rows["loss"].tolist() == [record.loss for record in kept]
    assert rows["tokens"].tolist() == np.cumsum([record.tokens for record in kept]).tolist()


def test_a_later_process_continues_from_the_cache(index: MetricsIndex, tmp_path: Path) -> None:
    index.source.write_text("".join(line(step) for step in range(1, 50)))
    read_all(index)
    again = MetricsIndex(index.source, tmp_path / "kept")
    assert not again.update()
    assert again.rows()[0].tobytes() == index.rows()[0].tobytes()
    assert again.fields == index.fields


@pytest.mark.parametrize("damage", ["{", '{"version": 1, "count": 3, "offset": 700}', "[]", "without fields"])
def test_a_damaged_cache_is_read_anew(index: MetricsIndex, tmp_path: Path, damage: str) -> None:
    index.source.write_text("".join(line(step) for step in range(1, 50)))
    read_all(index)
    if damage == "without fields":
        kept = json.loads((tmp_path / "kept.json").read_text())
        damage = json.dumps({key: value for key, value in kept.items() if key != "fields"})
    (tmp_path / "kept.json").write_text(damage)
    again = MetricsIndex(index.source, tmp_path / "kept")
    read_all(again)
    assert len(again.rows()[0]) == 49


@pytest.mark.parametrize("is_same_file", [False, True])
def test_a_file_that_was_written_again_is_read_from_its_beginning(
    index: MetricsIndex, tmp_path: Path, is_same_file: bool
) -> None:
    index.source.write_text("".join(line(step) for step in range(1, 50)))
    read_all(index)
    new = "".join(line(step, loss=7.0) for step in range(1, 80))
    if is_same_file:
        index.source.write_text(new)
    else:
        (tmp_path / "draft").write_text(new)
        (tmp_path / "draft").replace(index.source)
    read_all(index)
    rows, _ = index.rows()
    assert len(rows) == 79
    assert set(rows["loss"]) == {7.0}


def test_lines_that_are_no_steps_are_left_out() -> None:
    texts = ["", "{", "[1]", '{"step": true}', '{"step": -1}', line(1, loss=None), line(2, loss="5"), "[" * 5000]
    rows = parse_rows("\n".join([*texts, line(3, loss=1e300, tokens=10**400), line(4, loss=True)]).encode())
    assert rows["step"].tolist() == [1, 2, 3, 4]
    assert np.isnan(rows["loss"]).all()
    assert rows["tokens"].tolist() == [10, 10, 0, 10]


def test_samples_stand_for_what_is_not_read_yet(index: MetricsIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "CHUNK_BYTES", 10_000)
    index.source.write_text("".join(line(step) for step in range(1, 20_001)))
    index.update(limit=10_000)
    rows, is_sampled = index.rows()
    assert is_sampled
    assert 300 < len(rows) < 1_000
    assert np.all(np.diff(rows["step"]) > 0)
    assert rows["step"][-1] == 20_000
    assert rows["tokens"][-1] == 200_000
    assert math.isclose(rows["seconds"][-1], 10_000)
    read_all(index, limit=10**6)
    rows, is_sampled = index.rows()
    assert (len(rows), is_sampled) == (20_000, False)


def test_samples_of_a_small_or_missing_file(tmp_path: Path) -> None:
    assert len(sample_rows(tmp_path / "missing", 0)) == 0
    (tmp_path / "small").write_text(line(1))
    assert len(sample_rows(tmp_path / "small", 0)) == 0
