"""Tokenizers: from documents to arrays of token ids, and the id that ends a document.

`bytes` is built in (`byte_tokenizer`). Otherwise a Hugging Face tokenizer by folder, by tokenizer.json, or by hub name;
it is loaded only to encode. A document is encoded with the special tokens that the tokenizer adds (a BOS, for example);
the store ends it with `end_of_document`, if the tokenizer did not.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.core.errors import TokenizerError, first_line
from weft.core.vocabulary import BYTES
from weft.data.byte_tokenizer import ByteTokenizer, TokenArray, holds_byte_tokenizer
from weft.data.documents import Document, is_path_like
from weft.zoo.hub import snapshot_folder

# A bare tokenizer.json does not name the token that ends a text; common names, most specific first.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
_HINT = "set data.tokenizer to 'bytes', or to a folder, a tokenizer.json or a hub name of a tokenizer"


class Tokenizer(Protocol):
    """The methods that the token store needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def identity(self) -> str:
        """A value that changes when the same text may give other tokens."""
        ...

    def encode(self, document: Document) -> TokenArray: ...

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]: ...

    def encode_text(self, document: Document) -> TokenArray:
        """The tokens of a text inside of a document: without special tokens."""
        ...

    @property
    def backend(self) -> Any:
        """The tokenizer of transformers."""
        ...

    def template_identity(self) -> str:
        """A value that changes when the tokenizer's own chat template may have changed."""
        ...

    def save(self, folder: Path) -> None:
        """Write files to `folder` that `open_tokenizer` and transformers load as the same tokenizer."""
        ...


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.exists() and "@" in name and (local := Path(name.rpartition("@")[0]).expanduser()).exists():
        path = local  # a folder: the revision belongs to a hub name
    if not path.exists():
        if is_path_like(name) or path.suffix == ".json":
            raise TokenizerError(f"there is no tokenizer {name}", hint=_HINT)
        return HuggingFaceTokenizer(name=name, path=None)
    if path.is_dir() and not _tokenizer_files(path):
        raise TokenizerError(f"{name} holds no tokenizer files", hint=_HINT)
    folder = path.parent if path.name == "tokenizer.json" else path
    if holds_byte_tokenizer(folder):
        return ByteTokenizer(folder)
    return HuggingFaceTokenizer(name=name, path=path.resolve())


def find_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of a model by folder or hub name; None if it has none."""
    try:
        tokenizer = open_tokenizer(name)
        _ = tokenizer.vocab_size
    except TokenizerError:
        return None
    return tokenizer


class HuggingFaceTokenizer:
    """Any tokenizer that transformers loads; `path` is None for a hub name."""

    def __init__(self, *, name: str, path: Path | None) -> None:
        self.name = name
        self.path = path

    @cached_property
    def vocab_size(self) -> int:
        # Ids may have gaps, so the number of tokens is not always one past the largest id.
        return max(len(self.backend), 1 + max(self.backend.get_vocab().values(), default=0))

    @cached_property
    def end_of_document(self) -> int:
        token = self.backend.eos_token_id
        if token is None:
            vocabulary = self.backend.get_vocab()
            token = next((vocabulary[name] for name in _END_TOKENS if name in vocabulary), None)
        if token is None:
            token = self.backend.sep_token_id  # ends a text in encoders
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
            digest.update(_printed_form(self.backend))
        else:
            for file in _tokenizer_files(self.path):
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def encode(self, document: Document) -> TokenArray:
        return self.encode_batch([document])[0]

    def encode_text(self, document: Document) -> TokenArray:
        ids = self.backend(_as_text(document), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def template_identity(self) -> str:
        if self.path is None:
            return str(getattr(self.backend, "chat_template", None))
        return "".join(file.read_text(encoding="utf-8") for file in self._template_files())

    def encode_batch(self, documents: Sequence[Document]) -> list[TokenArray]:
        texts = [_as_text(document) for document in documents]
        # verbose=False: a document may be longer than the model's window, rows are split later.
        encoded = self.backend(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        # A text with special tokens only is an empty document.
        added = self.backend.num_special_tokens_to_add()
        return [np.asarray(ids if len(ids) > added else [], dtype=np.int64) for ids in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        if self.path is None or self.path.is_file():
            self.backend.save_pretrained(folder)
            return
        for file in [*_tokenizer_files(self.path), *self._template_files()]:
            shutil.copyfile(file, folder / file.name)

    def _template_files(self) -> list[Path]:
        """Files with nothing but a chat template; others have it in tokenizer_config.json."""
        path = self.path
        return sorted(file for file in path.glob("chat_template*") if file.is_file()) if path and path.is_dir() else []

    @cached_property
    def backend(self) -> Any:
        try:
            backend = self._load()
        except Exception as error:  # the loaders raise many kinds; all mean "not loadable"
            raise TokenizerError(
                f"the tokenizer {self.name} cannot be loaded: {first_line(error)}",
                hint=f"{_HINT}; a hub name needs the network or a filled cache",
            ) from None
        # For a model without tokenizer files transformers builds a tokenizer with an empty vocabulary.
        if set(backend.get_vocab().values()) <= set(backend.all_special_ids):
            raise TokenizerError(f"{self.name} holds no tokenizer files", hint=_HINT)
        return backend

    def _load(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        path = self.path if self.path is not None else _snapshot(self.name)
        if bare := _bare_file(path):
            return PreTrainedTokenizerFast(tokenizer_file=str(bare))
        folder = path if path.is_dir() else path.parent
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _snapshot(name: str) -> Path:
    """The files of NAME or NAME@REVISION in the hub's cache, downloaded if need be."""
    name, _, revision = name.partition("@")
    return snapshot_folder(name, revision=revision or None)


def _tokenizer_files(path: Path) -> list[Path]:
    """The files of the tokenizer, without the weights in the same folder."""
    folder = path if path.is_dir() else path.parent
    names = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "*.model")
    found = {file for name in names for file in folder.glob(name) if file.is_file()}
    return sorted(found | ({path} if path.is_file() else set()))


def _bare_file(path: Path) -> Path | None:
    """A tokenizer.json without the config that names its class for AutoTokenizer."""
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
    # The round trip replaces lone surrogates, on which tokenizers fail.
    return document.encode("utf-8", errors="replace").decode("utf-8")
