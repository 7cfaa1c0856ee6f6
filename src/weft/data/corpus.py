"""Corpus: from sources to tokens, tokenised once and cached under a digest of their origin.

It has documents and splits, but no rows and no ranks (`loader`). Of all processes that open the same corpus at
once, on one host or on hosts that share the cache, one builds and the others wait for its file while the owner
is alive: without a collective, and so without a timeout. The key of the file is
digest(format version, identity of the sources, identity of the tokenizer); the split is not part of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError
from weft.data.build_lock import BuildLock
from weft.data.building import BuildProgress, Silent, build_store, cannot_write, count_workers
from weft.data.mixture import Mixture
from weft.data.row_fields import SampleRow
from weft.data.samples import SampleEncoder, open_encoder
from weft.data.sources import Source, iterate_documents, total_bytes
from weft.data.split import Split, split_documents
from weft.data.store import FORMAT_VERSION, DamagedStoreError, TokenStore, open_store
from weft.data.tokenizers import Tokenizer

POLL_S = 0.2


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run. `evaluation` is None if no document is held out. Several sources are a mixture."""

    training: Split | Mixture
    evaluation: Split | Mixture | None
    vocab_size: int
    end_of_document: int
    num_documents: int
    num_tokens: int
    path: Path


def open_corpus_of(
    sources: list[Source],
    spec: DataSpec,
    *,
    cache_dir: str | Path | None = None,
    progress: BuildProgress | None = None,
) -> Corpus:
    """The corpus of these sources, built first if it is not cached, by this process or by another."""
    tokenizer = open_encoder(spec)
    place = _place_of(sources, tokenizer, cache_dir)
    store = place.find() or _await(place, sources, tokenizer, progress or Silent())
    if spec.row_truncation == "error" and spec.row_packing != "concatenate":
        _require_short(store, sources, spec)
    return _as_corpus(store, spec)


def find_corpus_of(sources: list[Source], spec: DataSpec, *, cache_dir: str | Path | None = None) -> Corpus | None:
    """The corpus of these sources if it is cached."""
    store = _place_of(sources, open_encoder(spec), cache_dir).find()
    return _as_corpus(store, spec) if store is not None else None


def _require_short(store: TokenStore, sources: list[Source], spec: DataSpec) -> None:
    """Raise for the first sample that is longer than a row, with its place."""
    lengths = np.diff(store.offsets)
    long = np.flatnonzero(lengths > spec.sequence_length + 1)
    if not len(long):
        return
    index = int(long[0]) // (2 if spec.format == "preference" else 1)
    document = next(itertools.islice(iterate_documents(sources), index, None))
    where = f"document {index + 1}" if spec.format == "text" else SampleRow.from_text(document).where
    raise DataError(
        f"{where}: the sample has {int(lengths[long[0]])} tokens, and a row of data.sequence_length ="
        f" {spec.sequence_length} has room for {spec.sequence_length + 1} ({len(long)} of"
        f" {len(lengths)} samples are too long)",
        hint="raise data.sequence_length, or set data.truncation to end, start or drop",
    )


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/weft, else ~/.cache/weft."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weft"
    except RuntimeError:
        raise DataError("there is no home folder for the token cache", hint="set XDG_CACHE_HOME to a folder") from None


def _place_of(sources: list[Source], tokenizer: Tokenizer | SampleEncoder, cache_dir: str | Path | None) -> _Place:
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    key = _key(sources, tokenizer)
    return _Place(path=folder.expanduser() / f"tokens-{key}.bin", key=key)


@dataclass(frozen=True)
class _Place:
    """The path of the store of a key."""

    path: Path
    key: str

    def find(self) -> TokenStore | None:
        """The store, if it exists and is complete."""
        try:
            return open_store(self.path, key=self.key)
        except (OSError, DamagedStoreError):
            return None


def _await(
    place: _Place, sources: list[Source], tokenizer: Tokenizer | SampleEncoder, progress: BuildProgress
) -> TokenStore:
    """The store, built by another process or by this one."""
    lock = BuildLock(place.path.with_suffix(".lock"))
    while not _acquire(lock, place.path.parent):
        progress.wait_for(lock.owner())
        time.sleep(POLL_S)
        if store := place.find():
            return store
    try:
        # Check again: the last owner may have finished before this process took the lock.
        return place.find() or _build(place, sources, tokenizer, progress)
    finally:
        lock.release()


def _build(
    place: _Place, sources: list[Source], tokenizer: Tokenizer | SampleEncoder, progress: BuildProgress
) -> TokenStore:
    try:
        build_store(
            place.path,
            iterate_documents(sources),
            tokenizer=tokenizer,
            key=place.key,
            num_workers=count_workers(),
            total_bytes=total_bytes(sources),
            progress=progress,
        )
    except DataError:
        # A builder that was taken for dead may have finished first and removed the parts of both.
        if store := place.find():
            return store
        raise
    try:
        return open_store(place.path, key=place.key)
    except (OSError, DamagedStoreError) as error:
        raise DataError(f"the token cache {place.path} was written but cannot be read back: {error}") from None


def _acquire(lock: BuildLock, folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock.acquire()
    except OSError as error:
        raise cannot_write(folder, error) from None


def _key(sources: list[Source], tokenizer: Tokenizer | SampleEncoder) -> str:
    identity = [FORMAT_VERSION, [source.identity() for source in sources], tokenizer.identity()]
    return hashlib.sha256(json.dumps(identity).encode("utf-8", errors="surrogateescape")).hexdigest()[:32]


def _as_corpus(store: TokenStore, spec: DataSpec) -> Corpus:
    header = store.header
    training, evaluation = split_documents(
        store.tokens,
        store.offsets,
        eval_fraction=spec.eval_fraction,
        vocab_size=header.vocab_size,
        end_of_document=header.end_of_document,
        has_mask=header.has_mask,
        together=2 if spec.format == "preference" else 1,
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
