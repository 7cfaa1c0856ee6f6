"""The built-in tokenizer: ids 0..255 are the bytes of the text, 256 ends a document.

An export has it as ordinary tokenizer files, which transformers loads with the same ids; a folder with
exactly those files is opened as bytes again, so that text which is not UTF-8 is unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.vocabulary import BYTE_VOCABULARY, BYTES
from weft.data.documents import Document

TokenArray = NDArray[np.integer[Any]]

END_TOKEN = "<|endoftext|>"
TEMPLATE_FILE = "chat_template.jinja"


class ByteTokenizer:
    """Encodes text as its bytes; `str` as UTF-8."""

    vocab_size = BYTE_VOCABULARY
    end_of_document = BYTE_VOCABULARY - 1

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: an exported one, which may have a chat template."""
        self._folder = folder

    def identity(self) -> str:
        return BYTES

    def encode(self, document: Document) -> TokenArray:
        # A lone surrogate (legal in JSON) has no UTF-8 form: write '?' instead of failing the run.
        data = document.encode("utf-8", errors="replace") if isinstance(document, str) else document
        return np.frombuffer(data, dtype=np.uint8)

    encode_text = encode

    def template_identity(self) -> str:
        template = self._template()
        return template.read_text(encoding="utf-8") if template is not None else ""

    @cached_property
    def backend(self) -> Any:
        """The same tokenizer of transformers, which renders chats."""
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        made = Tokenizer.from_str(_files()["tokenizer.json"])
        return PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token=END_TOKEN, chat_template=self.template_identity() or None
        )

    def _template(self) -> Path | None:
        path = self._folder / TEMPLATE_FILE if self._folder is not None else None
        return path if path is not None and path.is_file() else None

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]:
        return [self.encode(document) for document in documents]

    def save(self, folder: Path) -> None:
        template = self._template()
        for name, text in {**_files(), **({TEMPLATE_FILE: self.template_identity()} if template else {})}.items():
            (folder / name).write_text(text, encoding="utf-8")


def holds_byte_tokenizer(folder: Path) -> bool:
    """Whether the tokenizer files of this folder are those that `ByteTokenizer.save` writes."""
    try:
        return all((folder / name).read_text(encoding="utf-8") == text for name, text in _files().items())
    except (OSError, ValueError):
        return False


def _files() -> dict[str, str]:
    """A byte-level BPE without merges: every byte is a token of its own."""
    end = {"id": BYTE_VOCABULARY - 1, "content": END_TOKEN, "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **plain}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {**vocabulary, END_TOKEN: end["id"]}, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    return {name: json.dumps(fields, indent=1, ensure_ascii=False) + "\n" for name, fields in files.items()}


def _letters() -> list[str]:
    """The printable character of byte-level tokenizers for each byte: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
