"""Corpus: from a `DataSpec` to tokens, tokenised once and found again by a digest of what they came from.

It is not the loader: it knows documents and splits, no rows and no ranks beyond "who builds".
Order among ranks: the builder builds, everybody waits, everybody maps the same file. The key of the file is
digest(format version, identity of the sources, identity of the tokenizer); the split is not part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import DataError
from weft.core.run_spec import DataSpec
from weft.core.vocabulary import BYTES
from weft.data.sources import Source, iterate_documents, open_sources
from weft.data.split import Split, split_documents
from weft.data.store import FORMAT_VERSION, DamagedStoreError, TokenStore, build_store, open_store
from weft.data.tokenizers import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run. `evaluation` is None where nothing is held out."""

    training: Split
    evaluation: Split | None
    vocab_size: int
    end_of_document: int
    num_documents: int
    num_tokens: int
    path: Path


def open_corpus(
    spec: DataSpec,
    *,
    cache_dir: str | Path | None = None,
    is_builder: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> Corpus:
    """The corpus of `spec`, built first if need be.

    With several ranks, one of each shared cache folder is the builder, and `wait` is a barrier over all of them.
    """
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if is_builder:
        store = _open_or_build(spec, folder=folder)
        wait()
    else:
        # Only after the barrier: a dataset from the hub is then already downloaded, once.
        wait()
        store = _open_built(spec, folder=folder)
    return _as_corpus(store, eval_fraction=spec.eval_fraction)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/weft, else ~/.cache/weft."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weft"
    except RuntimeError:
        raise DataError("there is no home folder for the token cache", hint="set XDG_CACHE_HOME to a folder") from None


def _open_or_build(spec: DataSpec, *, folder: Path) -> TokenStore:
    sources, tokenizer = open_sources(spec), open_tokenizer(spec.tokenizer or BYTES)
    key = _key(sources, tokenizer)
    path = _store_path(folder, key)
    try:
        return open_store(path, key=key)
    except (OSError, DamagedStoreError):
        build_store(path, iterate_documents(sources), tokenizer=tokenizer, key=key)
    try:
        return open_store(path, key=key)
    except (OSError, DamagedStoreError) as error:
        raise DataError(f"the token cache {path} was written but cannot be read back: {error}") from None


def _open_built(spec: DataSpec, *, folder: Path) -> TokenStore:
    key = _key(open_sources(spec), open_tokenizer(spec.tokenizer or BYTES))
    path = _store_path(folder, key)
    try:
        return open_store(path, key=key)
    except (OSError, DamagedStoreError) as error:
        raise DataError(
            f"this rank does not find the token cache that another rank built: {error}",
            hint="put the cache and the data on a file system that all hosts share, or let one rank a host build",
        ) from None


def _key(sources: list[Source], tokenizer: Tokenizer) -> str:
    identity = [FORMAT_VERSION, [source.identity() for source in sources], tokenizer.identity()]
    return hashlib.sha256(json.dumps(identity).encode("utf-8", errors="surrogateescape")).hexdigest()[:32]


def _store_path(folder: Path, key: str) -> Path:
    return folder.expanduser() / f"tokens-{key}.bin"


def _as_corpus(store: TokenStore, *, eval_fraction: float) -> Corpus:
    header = store.header
    training, evaluation = split_documents(
        store.tokens,
        store.offsets,
        eval_fraction=eval_fraction,
        vocab_size=header.vocab_size,
        end_of_document=header.end_of_document,
    )
    return Corpus(
        training=training,
        evaluation=evaluation,
        vocab_size=header.vocab_size,
        end_of_document=header.end_of_document,
        num_documents=header.num_documents,
        num_tokens=header.num_tokens,
        path=store.path,
    )
