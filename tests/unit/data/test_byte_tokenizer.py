"""The byte tokenizer as files: transformers gives the same ids, and weft opens them as bytes again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import write_config

from weft.data.byte_tokenizer import ByteTokenizer
from weft.data.tokenizers import HuggingFaceTokenizer, open_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(made)
    return made


@pytest.fixture(scope="module")
def backend(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(name="bytes as files", path=folder)


@given(text=st.text(max_size=40))
def test_transformers_gives_the_same_ids(backend: HuggingFaceTokenizer, text: str) -> None:
    clean = text.encode("utf-8", errors="replace").decode()
    assert backend.encode(clean).tolist() == ByteTokenizer().encode(clean).tolist() == list(clean.encode())


def test_sizes_ends_and_the_way_back(backend: HuggingFaceTokenizer) -> None:
    assert (backend.vocab_size, backend.end_of_document) == (257, 256)
    text = "it's  a naïve\n\ttest \N{SPOOL OF THREAD}."
    assert backend.backend.decode(list(text.encode())) == text


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gemma2"])
def test_beside_any_config_it_is_the_tokenizer_of_the_folder(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ByteTokenizer().save(write_config(tmp_path, model_type=model_type))
    assert AutoTokenizer.from_pretrained(str(tmp_path))("é ö")["input_ids"] == list("é ö".encode())


def test_a_folder_with_these_files_is_bytes_also_where_text_is_not_utf8(folder: Path, tmp_path: Path) -> None:
    for name in (folder, folder / "tokenizer.json"):
        tokenizer = open_tokenizer(str(name))
        assert tokenizer.identity() == "bytes"
        assert tokenizer.encode(b"\xff\xfe").tolist() == [255, 254]
    ByteTokenizer().save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token"', '"bos_token"'))
    assert isinstance(open_tokenizer(str(tmp_path)), HuggingFaceTokenizer)
