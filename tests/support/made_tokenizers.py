"""Small real tokenizers, trained here on this text, as folders that transformers loads. For tests only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = [
    "The weft crosses the warp; the shuttle carries the thread from selvage to selvage.",
    "A loom with four shafts weaves twill and satin, and plain cloth with two.",
    "def weave(warp, weft):\n    return [warp[i] for i in weft]\n",
    "Größe, naïve, Übermut, 漢字, and 🧵 are text as well.",
]

KINDS = ("bpe", "bpe-bos", "bpe-bos-eos", "unigram", "unigram-bos", "wordpiece-cls-sep")


def make_tokenizer(folder: Path, kind: str, *, vocab_size: int = 400) -> Path:
    """The tokenizer files of `kind` (model, then the special tokens it adds by itself) in `folder`."""
    from transformers import PreTrainedTokenizerFast

    made, names = _train(kind, vocab_size=vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return folder


def own_encoding(folder: Path, text: str) -> list[int]:
    """What transformers makes of `text`, and an end of the document unless it has one."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(str(folder))
    end = backend.eos_token_id if backend.eos_token_id is not None else backend.sep_token_id
    ids: list[int] = backend(text)["input_ids"]
    return ids if ids[-1] == end else [*ids, end]


def put_in_hub_cache(cache: Path, name: str, folder: Path) -> None:
    """The files of `folder` as the hub's cache would hold them after a download of `name`."""
    root = cache / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())


def _train(kind: str, *, vocab_size: int) -> tuple[Any, dict[str, str]]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special: list[str]
    if kind.startswith("bpe"):
        made, special = Tokenizer(models.BPE()), ["<s>", "</s>"]
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind.startswith("unigram"):
        made, special = Tokenizer(models.Unigram()), ["<unk>", "<s>", "</s>"]
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        made, special = Tokenizer(models.WordPiece(unk_token="[UNK]")), ["[UNK]", "[CLS]", "[SEP]"]
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    form = {"bos": "<s> $A", "eos": "<s> $A </s>", "sep": "[CLS] $A [SEP]"}.get(kind.rpartition("-")[2])
    if form is not None:
        ids = [(token, made.token_to_id(token)) for token in form.split() if token != "$A"]
        made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    if kind.startswith("wordpiece"):
        return made, {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return made, {"bos_token": "<s>", "eos_token": "</s>"}


def write_config(folder: Path, **fields: Any) -> Path:
    """A Llama's config.json in `folder`: with tokenizer files beside it, a model without weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **fields}))
    return folder
