"""A run's low-bit export: its record, its perplexity on held-out rows, and what the command prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_run import metrics, train_here
from typer.testing import CliRunner

from weft.cli.main import app
from weft.core.errors import DataError, InputError
from weft.train import perplexity
from weft.train.export import export_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that evaluates all of its held-out rows."""
    folder = tmp_path_factory.mktemp("low-bit")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text("warp and weft " * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        settings: dict[str, Any] = {
            "train.steps": 2,
            "train.global_batch": 4,
            "logging.tensorboard": False,
            "data.eval_fraction": 0.2,
            "evaluation": {"every": 2, "batches": 50},
        }
        train_here(folder / "run", texts, settings)
    return folder / "run"


@pytest.fixture(autouse=True)
def cache(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))


def test_perplexity_before_is_that_of_the_runs_evaluation(run: Path, tmp_path: Path) -> None:
    found = export_run(run, tmp_path / "out", weights="int8", evaluate_rows=10_000)["weights"]
    measured = found["perplexity"]
    assert measured["before"] == pytest.approx(math.exp(metrics(run)[-1]["eval_loss"]), rel=1e-5)
    assert measured["after"] != measured["before"]
    assert abs(measured["change"]) < 1e-3
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) == found["bytes"]
    assert "lm_head" in found["kept"]["the head"] or "the head" not in found["kept"]
    assert not list(tmp_path.glob(".out-*")), "the unquantised copy was left behind"


def test_an_export_without_room_to_load_is_complete_and_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "available_bytes", lambda: 1000)
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out"), "--format", "int4"])
    assert result.exit_code == 0, result.output
    assert "perplexity was not measured: the model needs" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_command_prints_formats_and_perplexity(run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(run), "--out", str(tmp_path / "out"), "--format", "float8", "--evaluate-rows", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "in float8" in result.stderr
    assert "perplexity on 2 held-out rows: " in result.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_calibrated_export_reads_rows_that_are_not_measured(run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(run), "--out", str(tmp_path / "out"), "--format", "int4", "--calibrate", "gptq"]
    result = CliRunner().invoke(app, [*arguments, "--evaluate-rows", "1", "--calibrate-rows", "2"])
    assert result.exit_code == 0, result.output
    assert "matrices calibrated by GPTQ on 2 held-out rows" in result.stderr
    result = CliRunner().invoke(app, [*arguments, "--evaluate-rows", "10000"])
    assert isinstance(result.exception, DataError)
    assert "none is left to calibrate with" in result.exception.message


def test_formats_are_compared_in_one_table(run: Path) -> None:
    arguments = ["export", str(run), "--compare", "--evaluate-rows", "1", "--calibrate-rows", "2", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["formats"]
    assert [(row["format"], row["rounding"]) for row in rows] == [
        ("bfloat16", ""),
        *((kind, method) for kind in ("int8", "int4", "float8") for method in ("nearest", "gptq")),
        ("gguf-q8_0", "nearest"),
        ("gguf-q4_0", "nearest"),
    ]
    sizes = {row["format"]: row["bytes"] for row in rows}
    assert sizes["int4"] < sizes["int8"] < sizes["bfloat16"]
    assert all(abs(row["change"]) < 0.01 for row in rows)
    assert len({row["perplexity"] for row in rows}) == 9


@pytest.mark.parametrize(
    "options",
    [["--compare", "--format", "int8"], ["--compare", "--out", "x"], [], ["--out", "x", "--calibrate", "gptq"]],
)
def test_options_that_do_not_go_together_are_refused(run: Path, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["export", str(run), *options])
    assert isinstance(result.exception, InputError)
    assert result.exception.hint
