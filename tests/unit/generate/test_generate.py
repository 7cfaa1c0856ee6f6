"""`weft generate`: the texts that transformers makes, batches, figures, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_run import train_here, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from weft.cli.main import app
from weft.core.errors import InputError
from weft.generate.load import LoadedModel, load
from weft.generate.sample import Sampling, sample
from weft.train.export import export_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that has learnt some words."""
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        train_here(folder / "run", write_corpus(folder / "texts"), {"logging.tensorboard": False})
        export_run(folder / "run", folder / "exported")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return run.parent / "exported"


@pytest.fixture(scope="module")
def loaded(exported: Path) -> LoadedModel:
    return load(exported, step=None, dtype=torch.float32, device=CPU)


def test_greedy_text_is_the_argmax_of_the_model(exported: Path, loaded: LoadedModel) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("warp and ", return_tensors="pt").input_ids
    with torch.inference_mode():
        for _ in range(12):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    made = sample(loaded, ["warp and "], Sampling(max_new_tokens=12))
    assert made.texts == [tokenizer.decode(ids[0, 9:])]
    assert made.num_tokens == [12]
    assert made.cached_tokens == 9 + 12 - 1


def test_a_batch_of_prompts_of_several_lengths_is_each_prompt_alone(loaded: LoadedModel) -> None:
    prompts = ["warp", "the shuttle and the loom ", "x"]
    alone = [sample(loaded, [prompt], Sampling(max_new_tokens=10)).texts[0] for prompt in prompts]
    assert sample(loaded, prompts, Sampling(max_new_tokens=10)).texts == alone


def test_sampling_follows_its_seed(loaded: LoadedModel) -> None:
    def texts(seed: int) -> list[str]:
        return sample(loaded, ["warp"] * 3, Sampling(max_new_tokens=16, temperature=1.0, seed=seed)).texts

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) > 1


def test_a_run_generates_what_its_export_does_and_leaves_nothing_behind(run: Path, exported: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    results = []
    for source in (run, exported):
        command = ["generate", str(source), "--prompt", "warp and ", "--max-new-tokens", "8", "--dtype", "float32"]
        result = CliRunner().invoke(app, [*command, "--json"])
        assert result.exit_code == 0, result.output
        results.append(json.loads(result.stdout))
    assert [one["step"] for one in results] == [12, None]
    assert results[0]["samples"] == results[1]["samples"]
    assert results[0]["samples"][0]["tokens"] == 8
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int4"])
def test_the_command_prints_texts_and_the_cache_beside_its_prediction(
    exported: Path, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("warp\nweft and loom\n")
    command = ["generate", str(exported), "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, [*command, "--kv-cache", kind, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["prompt"] for one in found["samples"]] == ["warp", "weft and loom"]
    # 2 layers of 2 heads of 8 keys and 8 values, 13 + 6 - 1 tokens, 2 rows
    width = {"bf16": 32, "fp8": 20, "int8": 20, "int4": 12}[kind]
    assert found["memory"]["kv_cache_bytes"] == 2 * 2 * width * 18 * 2
    assert found["memory"]["predicted_kv_cache_bytes"] == found["memory"]["kv_cache_bytes"]
    assert found["tokens_per_s"] > 0
    plain = CliRunner().invoke(app, [*command, "--kv-cache", kind])
    assert plain.stdout.startswith("warp")
    assert "(predicted " in plain.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is no prompt"),
        (["--prompts", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--prompt", "a", "--step", "3"], "has no steps"),
        (["--prompt", "a", "--max-new-tokens", "9999999"], "positions"),
    ],
)
def test_bad_input_is_one_sentence(exported: Path, arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["generate", str(exported), *arguments])
    assert isinstance(result.exception, InputError) or sentence in str(result.exception)
    assert sentence in str(result.exception)
    assert result.exception.hint  # type: ignore[union-attr]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "a"])
    assert "neither a run folder nor a Hugging Face folder" in str(result.exception)


def test_weights_that_do_not_fit_are_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.generate.load.available_bytes", lambda: 1000)
    result = CliRunner().invoke(app, ["generate", str(exported), "--prompt", "a"])
    assert "of host memory are free" in str(result.exception)


def test_a_low_bit_folder_generates(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_run(run, tmp_path / "int8", weights="int8", dtype="bfloat16")
    command = ["generate", str(tmp_path / "int8"), "--prompt", "warp ", "--max-new-tokens", "4", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"][0]["tokens"] == 4
