"""Parts: the tokens of some neighbouring documents as one file, so that a build that was killed goes on where it was.

A part is trusted only where its checksums say that it is whole and was made of these very documents. The layout:

    one line of JSON (`PartHeader`), then num_documents lengths of int64, then the tokens, each document with its end
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.byte_tokenizer import TokenArray
from weft.data.documents import Document
from weft.data.tokenizers import Tokenizer

# Enough text that a process is worth its start, little enough that a kill loses seconds and memory stays small.
PART_DOCUMENTS = 1 << 16
PART_CHARACTERS = 4 << 20
# What a tokenizer gets at once: it may use its threads, and its lists take many times a text's size.
BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class PartHeader:
    """What a part was made of, and what it holds."""

    key: str
    documents_crc32: int
    num_documents: int
    num_tokens: int
    payload_crc32: int


@dataclass(frozen=True)
class Part:
    """Documents without tokens are left out; every length counts the end of its document."""

    lengths: NDArray[np.int64]
    tokens: TokenArray


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocab_size < 1 << 16 else np.uint32)


def divide(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents of each part in turn: a function of the documents alone, so that every build makes the same."""
    return _grouped(documents, num_documents=PART_DOCUMENTS, characters=PART_CHARACTERS)


def encode_part(documents: Sequence[Document], *, tokenizer: Tokenizer) -> Part:
    """Each document as the tokenizer encodes it, with one end: a tokenizer that puts an EOS gets no second."""
    dtype, end = token_dtype(tokenizer.vocab_size), tokenizer.end_of_document
    pieces: list[TokenArray] = []
    lengths: list[int] = []
    last = np.array([end], dtype=dtype)
    for batch in _grouped(documents, num_documents=BATCH_DOCUMENTS, characters=BATCH_CHARACTERS):
        for tokens in tokenizer.encode_batch(batch):
            if len(tokens):
                is_ended = tokens[-1] == end
                pieces += [tokens.astype(dtype)] if is_ended else [tokens.astype(dtype), last]
                lengths.append(len(tokens) + (not is_ended))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
    return Part(lengths=np.array(lengths, dtype=np.int64), tokens=tokens)


def write_part(path: Path, part: Part, *, key: str, documents_crc32: int) -> None:
    """The part under its name, whole or not at all: two builders may write the same one."""
    payload = part.lengths.tobytes() + part.tokens.tobytes()
    header = PartHeader(
        key=key,
        documents_crc32=documents_crc32,
        num_documents=len(part.lengths),
        num_tokens=len(part.tokens),
        payload_crc32=zlib.crc32(payload),
    )
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            file.write(json.dumps(asdict(header)).encode() + b"\n")
            file.write(payload)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def is_kept(path: Path, *, key: str, documents_crc32: int) -> bool:
    """Whether an earlier build finished this part, of the same documents, and it is whole."""
    try:
        with path.open("rb") as file:
            header = PartHeader(**json.loads(file.readline()))
            return (header.key, header.documents_crc32) == (key, documents_crc32) and _is_whole(header, file.read())
    except (OSError, ValueError, TypeError):
        return False


def read_part(path: Path, *, dtype: np.dtype[np.unsignedinteger]) -> Part:
    """A part that this build wrote or found to be whole."""
    with path.open("rb") as file:
        header = PartHeader(**json.loads(file.readline()))
        lengths = np.frombuffer(file.read(8 * header.num_documents), dtype=np.int64)
        return Part(lengths=lengths, tokens=np.frombuffer(file.read(), dtype=dtype))


def checksum(documents: Sequence[Document]) -> int:
    """Of the text and of where one document ends and the next begins."""
    found = 0
    for document in documents:
        data = document.encode("utf-8", errors="surrogatepass") if isinstance(document, str) else document
        found = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), found))
    return found


def _is_whole(header: PartHeader, payload: bytes) -> bool:
    return zlib.crc32(payload) == header.payload_crc32


def _grouped(documents: Iterable[Document], *, num_documents: int, characters: int) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if len(group) >= num_documents or size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group
