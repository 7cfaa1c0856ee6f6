"""Documents are encoded as the tokenizer itself does it: its BOS, its EOS, and one end of a document, never two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_tokenizers import KINDS, TEXT, make_tokenizer, own_encoding, put_in_hub_cache, write_config

from weft.core.data_spec import DataSpec
from weft.core.errors import TokenizerError
from weft.data import find_tokenizer, open_corpus, open_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_what_transformers_makes_of_each_document(kind: str, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / kind, kind)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(TEXT):
        (texts / f"{number}.txt").write_text(text, encoding="utf-8")
    spec = DataSpec(source=str(texts), tokenizer=str(folder), eval_fraction=0)
    corpus = open_corpus(spec, cache_dir=tmp_path / "cache")
    stream = corpus.training.read(np.array([0]), length=corpus.training.num_tokens)[0].tolist()
    documents = [own_encoding(folder, text) for text in TEXT]
    assert stream == [token for document in documents for token in document]
    assert stream.count(corpus.end_of_document) == len(TEXT)
    special = {token for document in documents for token in document[:1] if token < 3}
    assert bool(special) == ("-" in kind)  # a BOS where, and only where, the tokenizer adds one


def test_a_text_without_tokens_of_its_own_is_no_document(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "made", "wordpiece-cls-sep")))
    assert [len(ids) > 0 for ids in tokenizer.encode_batch(["loom", " \n ", ""])] == [True, False, False]


def test_a_truncation_saved_with_the_tokenizer_does_not_cut_documents(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_tokenizer(tmp_path / "made", "bpe-bos")
    whole = open_tokenizer(str(folder)).encode(TEXT[0]).tolist()
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(max_length=4)
    made.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(str(folder)).encode(TEXT[0]).tolist() == whole


def test_a_model_by_hub_name_has_its_tokenizer_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    folder = write_config(make_tokenizer(tmp_path / "made", "unigram-bos"))
    put_in_hub_cache(tmp_path / "home", "me/tiny", folder)
    put_in_hub_cache(tmp_path / "home", "me/bare", write_config(tmp_path / "bare", model_type="gpt2"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_tokenizer("me/tiny").encode(TEXT[1]).tolist() == own_encoding(folder, TEXT[1])[:-1]
    assert find_tokenizer("me/bare") is None
    with pytest.raises(TokenizerError, match="me/bare holds no tokenizer files") as caught:
        open_tokenizer("me/bare").encode("text")
    assert "data.tokenizer to 'bytes'" in caught.value.hint
