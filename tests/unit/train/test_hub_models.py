"""Training from a hub name begins with the weights that transformers' own `from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_cache import COMMIT, put_in_cache, use_cache
from tiny_run import TINY_RUN, metrics, run_tables, train_here, write_corpus
from tolerances import SAME_STEP_REL
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from weft.core.errors import WeightsError
from weft.core.run_spec import RunSpec
from weft.data import Loader, open_corpus
from weft.data.rows import RowLayout
from weft.train.ranks.process import leave

ONE_STEP = {"train.steps": 1, "evaluation.every": 0, "checkpoint.at_end": False}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_cache(tmp_path / "hub", monkeypatch)
    yield write_corpus(tmp_path / "texts")
    leave()


def save_model(folder: Path, *, shards: bool) -> Path:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**TINY_RUN["model"]["config"], vocab_size=320, pad_token_id=None))
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)  # a first loss that no random start has
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == shards
    return folder


def expected_loss(folder: Path, corpus: Path) -> float:
    """The first batch through transformers' own loading and loss."""
    run = RunSpec.from_tables(run_tables(corpus))
    rows = Loader(
        open_corpus(run.data).training,
        seed=run.train.seed,
        global_batch=run.train.global_batch,
        layout=RowLayout(sequence_length=32),
    )
    batch = rows.batch(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()


@pytest.mark.parametrize("shards", [False, True])
def test_the_first_loss_is_that_of_the_cached_weights(shards: bool, tmp_path: Path, corpus: Path) -> None:
    folder = save_model(tmp_path / "saved", shards=shards)
    put_in_cache(tmp_path / "hub", "me/tiny", folder)
    train_here(tmp_path / "run", corpus, {**ONE_STEP, "model": {"path": "me/tiny"}})
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(expected_loss(folder, corpus), rel=SAME_STEP_REL)
    assert RunSpec.from_file(tmp_path / "run" / "run.toml").model.revision == COMMIT


def test_weights_that_are_missing_are_never_random_and_nothing_is_started(tmp_path: Path, corpus: Path) -> None:
    folder = save_model(tmp_path / "saved", shards=False)
    (folder / "model.safetensors").unlink()
    put_in_cache(tmp_path / "hub", "me/tiny", folder)
    for path in ("me/tiny", str(folder)):
        with pytest.raises(WeightsError, match=r"has no model\.safetensors"):
            train_here(tmp_path / "run", corpus, {**ONE_STEP, "model": {"path": path}})
    assert not (tmp_path / "run").exists()
    train_here(tmp_path / "run", corpus, {**ONE_STEP, "model": {"path": str(folder), "weights": "random"}})
