"""What goes into a run and what comes out: folders of weights, finite data, one run folder, Hugging Face exports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks
from tiny_run import TINY_RUN, call_weft, checkpoint_steps, metrics, train_here, write_corpus
from tolerances import SAME_CURVE_LOSS_ABS, SAME_STEP_REL
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from weft.checkpoint import read_tensors
from weft.core.data_spec import DataSpec
from weft.core.errors import RunFolderError
from weft.data import Loader, open_corpus
from weft.data.rows import RowLayout
from weft.train.ranks.process import leave

DDP_X2 = {"mesh": {"dp_replicate": 2}}
ZERO3_X2 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
_WIDTHS = TINY_RUN["model"]["config"]
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"type": "llama", "config": _WIDTHS},
    "tied": {"type": "qwen3", "config": {**_WIDTHS, "head_dim": 8, "tie_word_embeddings": True}},
    "experts": {"type": "mixtral", "config": {**_WIDTHS, "num_local_experts": 4, "num_experts_per_tok": 2}},
}
# 5 documents of a few hundred bytes: not a whole number of batches of 8 rows of 32
FINITE = {"data.epochs": 1, "data.eval_fraction": 0.0, "train.steps": 1000}
SHORT = {"train.steps": 2}


def all_rank_runs(rank: int, world: int, cache: str, folder: str, corpus: str, small: str, weights: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    # Each rank brings a folder of its own, as ranks that start in different seconds do.
    train_here(Path(folder, f"finite-{rank}"), Path(small), FINITE, plan=DDP_X2)
    for name, model in MODELS.items():
        train_here(Path(folder, name), Path(corpus), {**SHORT, "model": model}, plan=ZERO3_X2)
    train_here(Path(folder, "from-folder"), Path(corpus), {**SHORT, "model": {"path": weights}}, plan=ZERO3_X2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("small") / "texts", num_documents=5)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained wrote."""
    folder = tmp_path_factory.mktemp("weights") / "llama"
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**_WIDTHS, vocab_size=320, pad_token_id=None)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(corpus: Path, cache: Path, small: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything two ranks train here, in one start of the ranks."""
    folder = tmp_path_factory.mktemp("runs")
    places = [str(path) for path in (cache, folder, corpus, small, weights)]
    run_ranks(all_rank_runs, 2, *places, timeout_s=180)
    return folder


def test_rank_zero_chooses_the_folder_of_all(runs: Path) -> None:
    assert (runs / "finite-0" / "ledger.json").exists()
    assert checkpoint_steps(runs / "finite-0")
    assert not (runs / "finite-1").exists()


def test_a_new_run_never_writes_into_an_old_one_but_a_restart_does(
    corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(tmp_path / "run", corpus, SHORT)
    with pytest.raises(RunFolderError, match="exists already"):
        train_here(tmp_path / "run", corpus, SHORT)
    leave()  # a failed run keeps its group
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    ledger = train_here(tmp_path / "run", corpus, {"train.steps": 3})
    assert (ledger["run"]["resumed_from"], len(metrics(tmp_path / "run"))) == (2, 3)


def test_finite_data_ends_on_the_same_step_at_any_number_of_ranks(
    runs: Path, small: Path, cache: Path, tmp_path: Path
) -> None:
    split = open_corpus(DataSpec(source=str(small), eval_fraction=0.0)).training
    rows = split.num_rows(32)
    assert rows % 8, "the tail must be uneven"
    train_here(tmp_path / "one", small, FINITE)
    one, two = metrics(tmp_path / "one"), metrics(runs / "finite-0")
    assert [line["step"] for line in one] == [line["step"] for line in two] == list(range(1, -(-rows // 8) + 1))
    assert [line["tokens"] for line in one] == [line["tokens"] for line in two]
    assert sum(line["tokens"] for line in one) == rows * 32
    for ours, theirs in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0, abs=SAME_CURVE_LOSS_ABS)
    assert not any("eval_loss" in line for line in one)
    facts = json.loads((tmp_path / "one" / "ledger.json").read_text())["run"]
    assert (facts["status"], facts["steps"]) == ("finished", len(one))


def test_a_folder_of_weights_is_trained_from_its_own_values(
    runs: Path, corpus: Path, cache: Path, weights: Path
) -> None:
    data = open_corpus(DataSpec(source=str(corpus), eval_fraction=0.1))
    batch = Loader(data.training, seed=3, global_batch=8, layout=RowLayout(sequence_length=32)).batch(0)
    model = LlamaForCausalLM.from_pretrained(weights)
    with torch.no_grad():
        expected = F.cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
    assert metrics(runs / "from-folder")[0]["loss"] == pytest.approx(expected.item(), rel=SAME_STEP_REL)
    notes = json.loads((runs / "from-folder" / "ledger.json").read_text())["model"]["notes"]
    assert f"weights were read from {weights}" in notes


def trained_model(run: Path) -> torch.nn.Module:
    """The run's own weights in a Hugging Face model, put there by their names."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "model"))
    tensors = dict(read_tensors(run / "checkpoints" / "step-00000002"))
    state = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= set(model.all_tied_weights_keys)
    model.tie_weights()
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(3, 67).view(2, 32)
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_an_export_of_sharded_weights_loads_with_equal_logits(name: str, runs: Path, tmp_path: Path) -> None:
    code, out, err = call_weft("export", runs / name, "--out", tmp_path / "hf", "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == 2
    exported, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert torch.equal(logits(exported.eval()), logits(trained_model(runs / name)))


def test_an_export_in_bfloat16_and_a_folder_in_the_way(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    assert call_weft("export", runs / "tied", "--out", target, "--dtype", "bfloat16")[0] == 0
    exported = AutoModelForCausalLM.from_pretrained(target).state_dict()
    expected = trained_model(runs / "tied").to(torch.bfloat16).state_dict()
    assert {value.dtype for value in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(exported[key], expected[key]) for key in expected)

    before = sorted(path.name for path in target.iterdir())
    code, out, err = call_weft("export", runs / "untied", "--out", target)
    assert (code, out) == (2, "")
    assert err.startswith(f"error [W501]: {target} is not empty")
    assert sorted(path.name for path in target.iterdir()) == before
    code, _, err = call_weft("export", runs / "untied", "--out", tmp_path / "other", "--step", "7")
    assert code == 2
    assert "W601" in err


def test_a_report_can_be_drawn_again(runs: Path, tmp_path: Path) -> None:
    page = runs / "tied" / "report.html"
    page.unlink()
    code, out, err = call_weft("report", runs / "tied", "--json")
    assert (code, json.loads(out)) == (0, {"report": str(page)}), err
    assert "ZeRO-3" in page.read_text(encoding="utf-8")
    code, out, err = call_weft("report", tmp_path)
    assert (code, out) == (2, "")
    assert "W501" in err
