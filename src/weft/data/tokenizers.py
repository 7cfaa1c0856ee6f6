"""Tokenizers: documents to arrays of token ids, and the one id that ends a document.

Built in: `bytes` (ids 0..255 are the bytes, 256 ends a document). Otherwise a Hugging Face tokenizer by folder, by
tokenizer.json, or by hub name; it is loaded only when something must be encoded. No special tokens are added:
the store puts `end_of_document` after each document, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import TokenizerError
from weft.core.vocabulary import BYTE_VOCABULARY
from weft.data.documents import Document, is_path_like

TokenArray = NDArray[np.integer[Any]]

BYTES = "bytes"

# A bare tokenizer.json does not say which token ends a text; these are the names in use, most specific first.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")


class Tokenizer(Protocol):
    """What the token store needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def identity(self) -> str:
        """Changes whenever the same text may give other tokens."""
        ...

    def encode(self, document: Document) -> TokenArray: ...

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]: ...


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.exists():
        if is_path_like(name) or path.suffix == ".json":
            raise TokenizerError(f"there is no tokenizer {name}", hint="give 'bytes', a folder or a tokenizer.json")
        return HuggingFaceTokenizer(name=name, path=None)
    if path.is_dir() and not _tokenizer_files(path):
        raise TokenizerError(f"{name} holds no tokenizer files", hint="the folder needs a tokenizer.json")
    return HuggingFaceTokenizer(name=name, path=path.resolve())


class ByteTokenizer:
    """The bytes of the text themselves; `str` is written as UTF-8."""

    vocab_size = BYTE_VOCABULARY
    end_of_document = BYTE_VOCABULARY - 1

    def identity(self) -> str:
        return BYTES

    def encode(self, document: Document) -> TokenArray:
        # A lone surrogate (legal in JSON) has no UTF-8 form; '?' stands for it rather than ending the run.
        data = document.encode("utf-8", errors="replace") if isinstance(document, str) else document
        return np.frombuffer(data, dtype=np.uint8)

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]:
        return [self.encode(document) for document in documents]


class HuggingFaceTokenizer:
    """Any tokenizer that transformers loads; `path` is None for a hub name."""

    def __init__(self, *, name: str, path: Path | None) -> None:
        self.name = name
        self.path = path

    @cached_property
    def vocab_size(self) -> int:
        # Ids may have gaps, so the number of tokens is not always one past the largest id.
        return max(len(self._backend), 1 + max(self._backend.get_vocab().values(), default=0))

    @cached_property
    def end_of_document(self) -> int:
        token = self._backend.eos_token_id
        if token is None:
            vocabulary = self._backend.get_vocab()
            token = next((vocabulary[name] for name in _END_TOKENS if name in vocabulary), None)
        if token is None:
            raise TokenizerError(
                f"the tokenizer {self.name} has no end-of-sequence token, which must end each document",
                hint="name one as eos_token in its tokenizer_config.json",
            )
        return int(token)

    def identity(self) -> str:
        """A digest of the tokenizer's files, so that a known corpus opens without loading the tokenizer."""
        digest = hashlib.sha256()
        if self.path is None:
            digest.update(_printed_form(self._backend))
        else:
            for file in _tokenizer_files(self.path):
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def encode(self, document: Document) -> TokenArray:
        return self.encode_batch([document])[0]

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]:
        texts = [_as_text(document) for document in documents]
        # verbose=False: a document longer than the model's window is no mistake here, rows are cut later.
        encoded = self._backend(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    @cached_property
    def _backend(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if self.path is None:
                return AutoTokenizer.from_pretrained(self.name)
            if bare := _bare_file(self.path):
                return PreTrainedTokenizerFast(tokenizer_file=str(bare))
            folder = self.path if self.path.is_dir() else self.path.parent
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the loaders raise many kinds; each means "not loadable", in its first line
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TokenizerError(
                f"the tokenizer {self.name} cannot be loaded: {reason}",
                hint="give 'bytes', a folder or a tokenizer.json; a hub name needs the network or a filled cache",
            ) from None


def _tokenizer_files(path: Path) -> list[Path]:
    """The files that decide what the tokenizer does; weights beside them are none of its business."""
    folder = path if path.is_dir() else path.parent
    names = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "spiece*")
    found = {file for name in names for file in folder.glob(name) if file.is_file()}
    return sorted(found | ({path} if path.is_file() else set()))


def _bare_file(path: Path) -> Path | None:
    """The tokenizer.json that stands alone, without the config that tells AutoTokenizer which class to take."""
    folder = path if path.is_dir() else path.parent
    file = path if path.is_file() else folder / "tokenizer.json"
    configured = (folder / "tokenizer_config.json").is_file() and file.name == "tokenizer.json"
    return file if file.is_file() and not configured else None


def _printed_form(backend: Any) -> bytes:
    fast = getattr(backend, "backend_tokenizer", None)
    text = fast.to_str() if fast is not None else repr(sorted(backend.get_vocab().items()))
    return str(text).encode()


def _as_text(document: Document) -> str:
    if isinstance(document, bytes):
        return document.decode("utf-8", errors="replace")
    # The round trip replaces lone surrogates, on which the tokenizers would stop.
    return document.encode("utf-8", errors="replace").decode("utf-8")
