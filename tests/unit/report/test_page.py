"""The page itself: it holds the data, asks the network for nothing, and lets no name out of its quotes."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from weft.core.errors import RunFolderError
from weft.report import write_report

Write = Callable[..., Path]
EVIL = "</script><script>alert('weft')</script>\"><img src=x onerror=alert(1)>"


def test_the_page_holds_the_curves_of_the_run(whole_folder: Write, steps_of: Any, page_of: Any) -> None:
    path = write_report(whole_folder())
    steps = steps_of(200)
    assert path.name == "report.html"
    figures = page_of(path).figures()
    assert set(figures) == {"loss", "learning-rate", "grad-norm", "throughput", "memory", "time"}
    training, smoothed, evaluation = figures["loss"]["data"]
    assert training["x"] == list(range(1, 201))
    assert training["y"] == [step["loss"] for step in steps]
    assert len(smoothed["y"]) == 200
    assert evaluation["x"] == [50, 100, 150, 200]
    assert evaluation["y"] == [step["eval_loss"] for step in steps if "eval_loss" in step]
    assert figures["learning-rate"]["data"][0]["y"] == [step["learning_rate"] for step in steps]


def test_the_head_and_the_tables_say_what_the_ledger_says(whole_folder: Write, page_of: Any) -> None:
    words = page_of(write_report(whole_folder())).text
    for told in ("5.31 M parameters", "ZeRO-3 (FSDP), 2 ranks", "AMD EPYC", "200 steps", "peak 300.4 MiB", "finished"):
        assert told in words
    for told in (
        "optimizer state",
        "20.2 MiB",
        "Every component found",
        "model.layers.0–5",
        "checkpoints/step-00000200",
    ):
        assert told in words
    for told in ("dp_shard = 2", 'source = "python-stdlib"', "transformers 5.22.0", "2026-03-01T09:30:00"):
        assert told in words
    assert "Remarks on this folder" not in words


def test_every_figure_has_a_box_with_words(whole_folder: Write, page_of: Any) -> None:
    page = page_of(write_report(whole_folder()))
    boxes = [value for tag, name, value in page.attributes if name == "data-figure"]
    labels = [value for tag, name, value in page.attributes if name == "aria-label"]
    assert sorted(boxes) == sorted(f"figure-{key}" for key in page.figures())
    assert any(label.startswith("Loss. From 5.569 at step 1 to 1.748 at step 200.") for label in labels)


def test_the_page_asks_the_network_for_nothing(whole_folder: Write, page_of: Any) -> None:
    page = page_of(write_report(whole_folder()))
    links = [
        value for _, name, value in page.attributes if name in {"src", "href", "action", "data", "srcset", "poster"}
    ]
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert page.tags.keys().isdisjoint({"iframe", "object", "embed", "base", "form"})
    for style in page.styles:
        assert "@import" not in style
        assert "url(" not in style
    own_script = page.code()[-1]
    assert not re.search(r"fetch|XMLHttpRequest|https?:", own_script)


def test_the_policy_allows_exactly_the_two_scripts_of_the_page(whole_folder: Write, page_of: Any) -> None:
    page = page_of(write_report(whole_folder()))
    contents = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    policy = next(value for value in contents if "default-src" in value)
    assert "default-src 'none'" in policy
    digests = re.findall(r"'sha256-([^']+)'", policy)
    found = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in page.code()]
    assert digests == found
    assert len(found) == 2
    assert not re.search(r"https?:|\*|script-src[^;]*unsafe", policy)


def test_plotly_is_in_the_page_once(whole_folder: Write) -> None:
    text = write_report(whole_folder()).read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1


def test_names_from_files_stay_text(whole_folder: Write, ledger_of: Any, page_of: Any) -> None:
    clean = page_of(write_report(whole_folder()))
    page = page_of(
        write_report(whole_folder(ledger=_poisoned(ledger_of()), run_text=f"# {EVIL}", plan_text=f"# {EVIL}"))
    )
    assert page.tags["script"] == clean.tags["script"]
    assert page.tags["img"] == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("alert('weft')") >= 10
    assert page.figures()["memory"]["data"][-1]["name"].startswith("&lt;/script&gt;")


def _poisoned(value: Any) -> Any:
    """Every string of the ledger with an attack behind it, and an attack among the memory terms."""
    if isinstance(value, dict):
        poisoned = {key: _poisoned(item) for key, item in value.items()}
        return {**poisoned, EVIL: 1_000} if "buffers" in value and "other" in value else poisoned
    if isinstance(value, list):
        return [_poisoned(item) for item in value]
    return value + EVIL if isinstance(value, str) else value


def test_the_same_folder_gives_the_same_bytes(whole_folder: Write) -> None:
    folder = whole_folder()
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()
    assert not list(folder.glob("*.tmp"))


def test_a_run_of_one_step_without_a_ledger_is_drawn_and_the_gaps_are_named(whole_folder: Write, page_of: Any) -> None:
    page = page_of(write_report(whole_folder(num_steps=1, ledger=None)))
    assert page.figures()["loss"]["data"][0]["mode"] == "markers"
    for told in ("no record of the end", "ledger.json is missing", "1 of 200 steps", "ZeRO-3 (FSDP), 2 ranks"):
        assert told in page.text
    for told in ("No dtypes were recorded", "No coverage was recorded", "No checkpoint was recorded", "No evaluation"):
        assert told in page.text


@pytest.mark.parametrize(
    ("part", "name"),
    [("steps", "metrics.jsonl"), ("ledger", "ledger.json"), ("run_text", "run.toml"), ("plan_text", "plan.toml")],
)
def test_any_one_file_may_be_missing(whole_folder: Write, page_of: Any, part: str, name: str) -> None:
    page = page_of(write_report(whole_folder(num_steps=3, **{part: None})))
    assert f"{name} is missing." in page.text
    assert page.tags["h1"] == 1


def test_a_run_stopped_before_its_first_step_says_so(whole_folder: Write, page_of: Any) -> None:
    page = page_of(write_report(whole_folder(steps=[], ledger=None)))
    assert page.figures() == {}
    assert "holds no step" in page.text
    assert "there is no curve to draw" in page.text


@pytest.mark.parametrize("broken", [{}, {"run": None, "memory": [], "coverage": 3}, {"memory": {"ranks": [1, {}]}}, []])
def test_a_ledger_with_holes_is_no_error(whole_folder: Write, page_of: Any, broken: Any) -> None:
    page = page_of(write_report(whole_folder(num_steps=3, ledger=broken)))
    assert "loss" in page.figures()
    assert "memory" not in page.figures()


def test_a_folder_without_a_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunFolderError) as caught:
            write_report(folder)
        assert caught.value.hint
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(whole_folder: Write) -> None:
    folder = whole_folder(num_steps=1)
    (folder / "report.html").mkdir()
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_report(folder)
    assert not list(folder.glob("*.tmp"))


def test_a_report_is_small(whole_folder: Write) -> None:
    assert write_report(whole_folder()).stat().st_size < 1_300_000


def test_figures_are_what_plotly_draws(whole_folder: Write, page_of: Any) -> None:
    """The traces of the vendored bundle, with names and values of plotly's own schema."""
    for figure in page_of(write_report(whole_folder())).figures().values():
        assert {trace["type"] for trace in figure["data"]} <= {"scatter", "bar", "heatmap"}
        go.Figure(figure)  # refuses unknown names and values


def test_the_report_needs_no_torch() -> None:
    code = "import sys, weft.report, weft.report.training.page; assert not {'plotly', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
