"""Kept curves are those that would be made now: across processes, and after every change of the metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from weft.ui import indexer, page_data
from weft.ui.index import CHUNK_BYTES
from weft.ui.page_data import MANY, WIDTH_OF_MANY, PageData

STEPS = 5_000
OPEN: list[PageData] = []


def write_run(path: Path, *, steps: int = STEPS, spike: float = 50.0) -> None:
    path.mkdir(parents=True)
    lines = ({"step": step, "loss": spike if step == 1234 else 5 / step, "tokens": 8} for step in range(1, steps + 1))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().indexer.close()


def opened(folder: Path) -> PageData:
    answers = PageData(folder / "runs", folder / "cache")
    OPEN.append(answers)
    answers.table()
    while answers.indexer.update_all():
        pass
    return answers


def curve(answers: PageData, **query: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answers.curves({"run": ["one"], **{key: [word] for key, word in query.items()}}))
    return found["curves"][0]


def test_the_highest_and_lowest_values_are_kept_across_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "one")
    first = opened(tmp_path)
    found = curve(first, width="100")
    assert (max(found["y"]), min(found["y"])) == (50.0, pytest.approx(5 / STEPS))
    assert found["x"][found["y"].index(50.0)] == 1234
    first.indexer.close()
    monkeypatch.setattr(page_data, "_curve", None)  # whatever is made now fails
    second = opened(tmp_path)
    assert curve(second, width="100") == found


def test_a_longer_and_a_replaced_file_are_drawn_anew(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    write_run(run)
    answers = opened(tmp_path)
    assert curve(answers)["x"][-1] == STEPS
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS + 1, "loss": 0.5, "tokens": 8}) + "\n")
    answers.indexer.update_all()
    assert curve(answers)["x"][-1] == STEPS + 1
    text = (run / "metrics.jsonl").read_text()
    (run / "another").write_text(text.replace("50.0", "60.0"))  # as long as before
    (run / "another").replace(run / "metrics.jsonl")
    while answers.indexer.update_all():
        pass
    assert max(curve(answers)["y"]) == 60.0


def test_a_zoomed_curve_is_of_its_own_range(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    answers = opened(tmp_path)
    whole = curve(answers)
    assert curve(answers, low="1000", high="1010")["x"] == list(range(999, 1012))
    assert curve(answers) == whole


def test_smoothed_curves_of_many_runs_are_their_means(tmp_path: Path) -> None:
    for number in range(MANY + 1):
        write_run(tmp_path / "runs" / f"{number:02d}", steps=400)
    answers = opened(tmp_path)
    names = [f"{number:02d}" for number in range(MANY + 1)]
    means = json.loads(answers.curves({"run": names, "smoothed": ["1"]}))["curves"]
    whole = json.loads(answers.curves({"run": names}))["curves"]
    for short, long in zip(means, whole, strict=True):
        assert (short["x"], short["y"], len(short["mean_x"])) == ([], [], WIDTH_OF_MANY)
        assert short["mean_y"] == long["mean_y"]
        assert len(long["x"]) > WIDTH_OF_MANY
    few = json.loads(answers.curves({"run": names[:MANY], "smoothed": ["1"]}))["curves"]
    assert all(one["x"] for one in few)


def test_what_is_prepared_is_what_the_page_asks_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "one")
    answers = opened(tmp_path)
    answers.prepare()
    monkeypatch.setattr(page_data, "_curve", None)
    assert curve(answers, field="loss", x="step", log="0", smoothed="1")["x"][-1] == STEPS


def test_large_files_are_read_after_the_first_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SAMPLES_S", 1_000.0)
    write_run(tmp_path / "runs" / "small", steps=100)
    write_run(tmp_path / "runs" / "one", steps=CHUNK_BYTES // 30)
    answers = PageData(tmp_path / "runs", tmp_path / "cache")
    OPEN.append(answers)
    large, small = (answers.indexer.open(tmp_path / "runs" / name) for name in ("one", "small"))
    answers.indexer.start()
    wait_for(lambda: small.state[0] == small.state[1])
    assert large.state[0] == 0
    sampled = curve(answers)
    assert sampled["sampled"]
    assert sampled["x"][-1] == CHUNK_BYTES // 30
