"""Which tokenizer a run takes: the model's own unless one is given; run.toml records it; a misfit is an error."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizers import make_tokenizer, own_encoding
from tiny_run import call_weft, run_tables, train_here, write_corpus, write_run
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from weft.core.errors import TokenizerError
from weft.core.run_spec import RunSpec
from weft.train.export import export_run

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHORT = {"train.steps": 2, "train.global_batch": 4, "evaluation.every": 0, "logging.tensorboard": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "texts", num_documents=6)


def model_folder(folder: Path, *, kind: str | None = "bpe-bos", vocab_size: int = 448) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab_size)).save_pretrained(folder)
    return make_tokenizer(folder, kind) if kind is not None else folder


def settings_of(model: dict[str, Any], tokenizer: str | None = None) -> dict[str, Any]:
    data = {"sequence_length": 32, "eval_fraction": 0.0} | ({"tokenizer": tokenizer} if tokenizer else {})
    return {**SHORT, "model": model, "data": data}


def tables(corpus: Path, settings: dict[str, Any]) -> dict[str, Any]:
    settings["data"]["source"] = str(corpus)
    return run_tables(corpus, settings)


def recorded(run: Path) -> str:
    return str(tomllib.loads((run / "run.toml").read_text())["data"]["tokenizer"])


def notes_of(ledger: dict[str, Any]) -> str:
    return " ".join(ledger["model"]["notes"])


def test_a_choice_left_open_is_the_models_own_and_part_of_the_value(corpus: Path) -> None:
    own = RunSpec.from_tables(tables(corpus, settings_of({"path": "some/model"})))
    assert own.tokenizer == own.data.tokenizer == "some/model"
    assert RunSpec.from_tables(tomllib.loads(own.to_toml())) == own
    assert RunSpec.from_tables(tables(corpus, settings_of({"type": "llama"}))).data.tokenizer == "bytes"
    pinned = RunSpec.from_tables(tables(corpus, settings_of({"path": "some/model", "revision": "v2"})))
    assert pinned.tokenizer == "some/model@v2"
    given = RunSpec.from_tables(tables(corpus, settings_of({"path": "some/model"}, "other")))
    assert given.tokenizer == "other"


def test_a_pretrained_model_trains_on_its_own_tokens(corpus: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    ledger = train_here(tmp_path / "run", corpus, settings_of({"path": str(folder)}) | {"data.source": str(corpus)})
    assert recorded(tmp_path / "run") == str(folder)
    assert "data.tokenizer" not in notes_of(ledger)
    # the first loss is that of the very model on the very rows, by transformers alone
    text = [path.read_text() for path in sorted(corpus.iterdir())]
    stream = [token for one in text for token in own_encoding(folder, one)]
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert stream[0] == AutoTokenizer.from_pretrained(str(folder)).bos_token_id
    rows = torch.tensor([stream[at : at + 33] for at in range(0, len(stream) - 33, 32)])
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(folder)
        losses = torch.stack([model(row[None], labels=row[None]).loss for row in rows])
    assert losses.min() <= first["loss"] <= losses.max()


def test_a_resumed_run_keeps_its_tokenizer(corpus: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    settings = settings_of({"path": str(folder)}, "bytes") | {"data.source": str(corpus)}
    ledger = train_here(tmp_path / "run", corpus, settings)
    assert "'bytes' is not the tokenizer of" in notes_of(ledger)
    code, _, err = call_weft("train", "--resume", tmp_path / "run", "--set", "train.steps=3", "--device", "cpu")
    assert code == 0, err
    assert recorded(tmp_path / "run") == "bytes"


def test_tokens_beyond_the_table_are_refused(corpus: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", vocab_size=300)
    with pytest.raises(TokenizerError, match=r"has 388 tokens but the model's vocabulary holds 300") as caught:
        train_here(tmp_path / "run", corpus, settings_of({"path": str(folder)}) | {"data.source": str(corpus)})
    assert "vocab_size" in caught.value.hint


def test_a_model_without_a_tokenizer_needs_the_key(corpus: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", kind=None)
    with pytest.raises(TokenizerError, match="holds no tokenizer files") as caught:
        train_here(tmp_path / "run", corpus, settings_of({"path": str(folder)}) | {"data.source": str(corpus)})
    assert "data.tokenizer to 'bytes'" in caught.value.hint
    settings = settings_of({"path": str(folder)}, "bytes") | {"data.source": str(corpus)}
    ledger = train_here(tmp_path / "other", corpus, settings)
    assert "257 tokens, but the vocabulary of" in notes_of(ledger)


def test_an_export_carries_the_tokenizer_bytes_too(corpus: Path, tmp_path: Path) -> None:
    tiny = {"type": "llama", "config": SIZES}
    train_here(tmp_path / "run", corpus, settings_of(tiny) | {"data.source": str(corpus)})
    assert recorded(tmp_path / "run") == "bytes"
    exported = tmp_path / "exported"
    result = export_run(tmp_path / "run", exported)
    assert "tokenizer.json" in result["files"]
    assert AutoTokenizer.from_pretrained(str(exported))("weft é")["input_ids"] == list("weft é".encode())
    ledger = train_here(tmp_path / "again", corpus, settings_of({"path": str(exported)}) | {"data.source": str(corpus)})
    assert recorded(tmp_path / "again") == str(exported)
    assert "data.tokenizer" not in notes_of(ledger)
    assert export_run(tmp_path / "again", tmp_path / "twice")["note"] == ""


def test_an_export_goes_on_without_a_tokenizer_that_moved(corpus: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "unigram")
    settings = settings_of({"type": "llama", "config": SIZES}, str(tokenizer)) | {"data.source": str(corpus)}
    train_here(tmp_path / "run", corpus, settings)
    tokenizer.rename(tmp_path / "moved")
    result = export_run(tmp_path / "run", tmp_path / "exported")
    assert "there is no tokenizer" in result["note"]
    assert "model.safetensors" in result["files"]


def test_a_dry_run_needs_no_tokenizer_but_checks_the_one_there_is(corpus: Path, tmp_path: Path) -> None:
    settings = settings_of({"path": str(model_folder(tmp_path / "bare", kind=None))}) | {"data.source": str(corpus)}
    code, _, err = call_weft("dryrun", write_run(tmp_path / "bare.toml", corpus, settings), "--json")
    assert code == 0, err
    large = settings_of({"path": str(model_folder(tmp_path / "large", vocab_size=300))})
    run = write_run(tmp_path / "large.toml", corpus, large | {"data.source": str(corpus)})
    code, _, err = call_weft("dryrun", run, "--json")
    assert (code, "W402" in err) == (2, True)
