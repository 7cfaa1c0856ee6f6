"""The token store: one memory-mapped file with all tokens of a corpus and the offset of each document.

It has no splits, rows or sources; `building` creates its parts. The layout, in this order:

    header   4096 bytes: one line of JSON (kind, counts, digest of the line itself), padded with spaces
    tokens   num_tokens of uint16 (vocabulary below 65536) or uint32, padded to a multiple of 8 bytes; of samples: words
    offsets  num_documents + 1 of int64; document d is tokens[offsets[d]:offsets[d + 1]], its end token included

A file is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from weft.core.disk import drafted
from weft.core.errors import DataError
from weft.core.json_files import parse_json
from weft.data.byte_tokenizer import TokenArray
from weft.data.parts import TokenPart
from weft.data.samples import SampleEncoder
from weft.data.tokenizers import Tokenizer
from weft.data.words import word_dtype

FORMAT_VERSION = 2
HEADER_BYTES = 4096


class DamagedStoreError(Exception):
    """The file is not a complete store for this key: build it again. Never shown to a user."""


@dataclass(frozen=True)
class StoreHeader:
    """The fields needed to map the file and to detect a wrong one."""

    key: str
    vocab_size: int
    end_of_document: int
    num_tokens: int = 0
    num_documents: int = 0
    offsets_crc32: int = 0
    format_version: int = FORMAT_VERSION
    has_mask: bool = False  # tokens are words of samples

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return word_dtype(self.vocab_size, has_mask=self.has_mask)

    @property
    def offsets_at(self) -> int:
        return HEADER_BYTES + _align(self.num_tokens * self.dtype.itemsize)

    @property
    def file_bytes(self) -> int:
        return self.offsets_at + 8 * (self.num_documents + 1)

    def to_bytes(self) -> bytes:
        fields = asdict(self)
        line = json.dumps({**fields, "digest": _digest(fields)})
        return line.encode().ljust(HEADER_BYTES - 1) + b"\n"

    @staticmethod
    def from_bytes(data: bytes) -> StoreHeader:
        try:
            fields = parse_json(data)
            if fields.pop("digest") != _digest(fields):
                raise DamagedStoreError("the header was altered")
            return StoreHeader(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedStoreError(f"the header is unreadable: {error}") from None


@dataclass(frozen=True)
class TokenStore:
    """An open store; `tokens` maps the file, so only pages that were read take memory."""

    path: Path
    header: StoreHeader
    tokens: TokenArray
    offsets: NDArray[np.int64]


def open_store(path: Path, *, key: str) -> TokenStore:
    """Map the store; raises FileNotFoundError or DamagedStoreError."""
    with path.open("rb") as file:
        header = StoreHeader.from_bytes(file.read(HEADER_BYTES))
        size_bytes = os.fstat(file.fileno()).st_size
        if (header.key, header.format_version) != (key, FORMAT_VERSION):
            raise DamagedStoreError("the header belongs to other data")
        if size_bytes != header.file_bytes:
            raise DamagedStoreError(f"the file has {size_bytes} bytes instead of {header.file_bytes}")
        tokens = np.memmap(file, dtype=header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.num_tokens,))
        shape = (header.num_documents + 1,)
        offsets = np.memmap(file, dtype=np.int64, mode="r", offset=header.offsets_at, shape=shape)
    # A wrong offset would silently shift every document after it.
    if zlib.crc32(offsets.data) != header.offsets_crc32:
        raise DamagedStoreError("the document offsets were altered")
    # Plain views of the maps: every slice of a memmap object costs ten times that of an array.
    return TokenStore(path=path, header=header, tokens=tokens.view(np.ndarray), offsets=offsets.view(np.ndarray))


def write_store(
    path: Path, parts: Iterable[TokenPart], *, tokenizer: Tokenizer | SampleEncoder, key: str, scratch: Path
) -> None:
    """Write the parts, in order, as the store `path`; drafted in `scratch`, a folder of the same file system."""
    draft = scratch / f".store.{uuid.uuid4().hex}"  # with the permissions of the umask: a cache may be shared
    with drafted(draft, path), draft.open("xb") as file:
        _write(file, parts, tokenizer=tokenizer, key=key)
        file.flush()
        # A file that is renamed before its bytes are on disk can be empty after a power cut.
        os.fsync(file.fileno())


def _write(file: IO[bytes], parts: Iterable[TokenPart], *, tokenizer: Tokenizer | SampleEncoder, key: str) -> None:
    header = StoreHeader(
        key=key,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        has_mask=isinstance(tokenizer, SampleEncoder),
    )
    file.write(bytes(HEADER_BYTES))
    offsets = array("q", [0])
    for part in parts:
        file.write(part.tokens.astype(header.dtype, copy=False).tobytes())
        offsets.extend((offsets[-1] + np.cumsum(part.lengths)).tolist())
    header = replace(header, num_tokens=offsets[-1], num_documents=len(offsets) - 1, offsets_crc32=zlib.crc32(offsets))
    if not header.num_documents:
        raise DataError("the data source has no text", hint="check data.source; empty documents are skipped")
    file.write(bytes(header.offsets_at - file.tell()))
    file.write(memoryview(offsets))
    file.seek(0)
    file.write(header.to_bytes())


def _align(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8


def _digest(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
