"""What several tests of the data room need: a tokenizer folder made here, and a way to write rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = ["<unk>", "<end>", "one", "two", "three", "four"]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word-level Hugging Face tokenizer: <unk> 0, <end> 1, one 2, two 3, three 4, four 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
