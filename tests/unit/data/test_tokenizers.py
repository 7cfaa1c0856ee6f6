"""Bytes are bytes; a Hugging Face tokenizer comes from a folder, a file or the hub's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hub_cache import put_in_cache, use_cache

from weft.core.errors import TokenizerError
from weft.data.tokenizers import HuggingFaceTokenizer, open_tokenizer


def test_bytes() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.encode(b"\x00\xff").tolist() == [0, 255]
    assert tokenizer.encode("a\ud800").tolist() == [97, ord("?")]


def test_a_folder(tokenizer_folder: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_folder))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (6, 1)
    assert tokenizer.encode("one three five").tolist() == [2, 4, 0]
    assert [ids.tolist() for ids in tokenizer.encode_batch([b"two", "four four \ud800", b"\xff"])] == [
        [3],
        [5, 5, 0],
        [0],
    ]


def test_a_lone_tokenizer_json_needs_an_end_token_it_can_name(tokenizer_folder: Path, tmp_path: Path) -> None:
    text = (tokenizer_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match="no end-of-sequence token") as caught:
        _ = open_tokenizer(str(tmp_path / "tokenizer.json")).end_of_document
    assert "eos_token" in caught.value.hint
    (tmp_path / "tokenizer.json").write_text(text.replace("<end>", "</s>"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = open_tokenizer(str(name))
        assert tokenizer.end_of_document == 1
        assert tokenizer.encode("two").tolist() == [3]


def test_a_file_beside_its_config_is_the_folder(tokenizer_folder: Path) -> None:
    assert open_tokenizer(str(tokenizer_folder / "tokenizer.json")).end_of_document == 1


def test_identity_follows_the_files_and_not_the_place(tokenizer_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tokenizer_folder, copy)
    (copy / "model.safetensors").write_bytes(b"weights are not part of it")
    before = open_tokenizer(str(tokenizer_folder)).identity()
    assert open_tokenizer(str(copy)).identity() == before
    config = copy / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    assert open_tokenizer(str(copy)).identity() != before


def test_identity_loads_nothing(tokenizer_folder: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_folder))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    tokenizer.identity()
    assert "_backend" not in vars(tokenizer)


def test_a_hub_name_is_its_files_in_the_cache_and_its_absence_is_one_sentence(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(tmp_path / "hub", monkeypatch)
    put_in_cache(tmp_path / "hub", "owner/words", tokenizer_folder)
    known = open_tokenizer("owner/words")
    assert known.encode("one").tolist() == [2]
    assert open_tokenizer("owner/words@main").encode("one").tolist() == [2]
    assert len(known.identity()) == 64
    with pytest.raises(TokenizerError, match=r"cannot be loaded: owner/absent is no folder") as caught:
        open_tokenizer("owner/absent").identity()
    assert "'bytes'" in caught.value.hint


@pytest.mark.parametrize("name", ["./absent", "/absent/tokenizer", "a/b/c", "absent.json"])
def test_a_missing_path_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(TokenizerError, match="there is no tokenizer"):
        open_tokenizer(name)


def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer files"):
        open_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        open_tokenizer(str(tmp_path)).encode("x")
