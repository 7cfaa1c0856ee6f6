"""Builds a token store: documents to parts, in parallel processes if there are many, then parts to one file.

The lock around a build (`build_lock`) only saves work: parts and the store are written under other names and renamed
when complete, so two concurrent builders write the same files. A killed build leaves its parts; the next build reads
the documents again and encodes only the missing parts. The result has the order of the documents.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weft.core.errors import DataError
from weft.core.processes import num_cores
from weft.data import parts
from weft.data.documents import Document
from weft.data.encode_pool import EncodePool, EncodeTask
from weft.data.samples import SampleEncoder
from weft.data.store import write_store
from weft.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from weft.data.words import word_dtype

# With fewer parts, one process finishes before others have started.
PARTS_FOR_A_POOL = 3
# Each process takes a few hundred MiB, and one reader feeds them all.
MOST_WORKERS = 32
# The data or the tokenizer of older parts has changed, so they will not be used again.
ABANDONED_AFTER_S = 7 * 24 * 3600.0


class BuildProgress(Protocol):
    """Receives the progress of a build; by default it shows nothing."""

    def start(self, total_bytes: int | None) -> None:
        return

    def advance(self, num_bytes: int) -> None:
        return

    def stop(self) -> None:
        return

    def wait_for(self, owner: str) -> None:
        """Report that another process builds."""
        return


class Silent(BuildProgress):
    pass


@dataclass(frozen=True, kw_only=True)
class _Build:
    folder: Path
    tokenizer: Tokenizer | SampleEncoder
    key: str
    progress: BuildProgress

    def path(self, index: int) -> Path:
        return self.folder / f"{index:06d}"


def build_store(
    path: Path,
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer | SampleEncoder,
    key: str,
    num_workers: int = 1,
    total_bytes: int | None = None,
    progress: BuildProgress | None = None,
) -> None:
    """Encode the documents into the store `path`, reusing the parts of an earlier build of the same key."""
    progress = progress or Silent()
    build = _Build(folder=path.with_suffix(".parts"), tokenizer=tokenizer, key=key, progress=progress)
    try:
        _remove_abandoned(path.parent)
        build.folder.mkdir(parents=True, exist_ok=True)
        progress.start(total_bytes)
        num_parts = _encode(build, documents, num_workers=num_workers)
        dtype = word_dtype(tokenizer.vocab_size, has_mask=isinstance(tokenizer, SampleEncoder))
        found = (parts.read_part(build.path(index), dtype=dtype) for index in range(num_parts))
        write_store(path, found, tokenizer=tokenizer, key=key, scratch=build.folder)
    except DataError:
        shutil.rmtree(build.folder, ignore_errors=True)  # the data must change, and with it the key
        raise
    except OSError as error:
        raise cannot_write(path.parent, error) from None
    finally:
        progress.stop()
    shutil.rmtree(build.folder, ignore_errors=True)


def cannot_write(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the token cache {folder} cannot be written: {error.strerror or error}",
        hint="free some space, or set XDG_CACHE_HOME to a folder that can be written",
    )


def count_workers() -> int:
    return min(num_cores(), MOST_WORKERS)


def _encode(build: _Build, documents: Iterable[Document], *, num_workers: int) -> int:
    """Encode every part into a file; returns the number of parts."""
    count = itertools.count()
    tasks = _missing(build, documents, count)
    first = list(itertools.islice(tasks, PARTS_FOR_A_POOL))
    tasks = itertools.chain(first, tasks)
    is_worth_it = num_workers > 1 and len(first) == PARTS_FOR_A_POOL
    if is_worth_it and isinstance(build.tokenizer, HuggingFaceTokenizer | SampleEncoder):
        encoder = build.tokenizer.name if isinstance(build.tokenizer, HuggingFaceTokenizer) else build.tokenizer.spec
        with EncodePool(encoder, num_workers=num_workers, key=build.key) as pool:
            pool.run(tasks, done=lambda task: build.progress.advance(task.num_bytes))
    else:
        for task in tasks:
            part = parts.encode_part(task.documents, tokenizer=build.tokenizer)
            parts.write_part(task.path, part, key=build.key, documents_crc32=task.documents_crc32)
            build.progress.advance(task.num_bytes)
    return next(count)


def _missing(build: _Build, documents: Iterable[Document], count: Iterator[int]) -> Iterator[EncodeTask]:
    """The parts that are not encoded yet; advances `count` once per part."""
    for group in parts.divide(documents):
        task = EncodeTask(path=build.path(next(count)), documents=group, documents_crc32=parts.checksum(group))
        if parts.is_kept(task.path, key=build.key, documents_crc32=task.documents_crc32):
            build.progress.advance(task.num_bytes)
        else:
            yield task


def _remove_abandoned(cache: Path) -> None:
    """Delete old parts of killed builds, which would fill the disk."""
    for folder in cache.glob("*.parts"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
