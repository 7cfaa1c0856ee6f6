"""Parts: the tokens of some consecutive documents as one file, so that a killed build resumes.

A part is used only if its checksums show that it is complete and of the same documents. The layout:

    one line of JSON (`PartHeader`), then num_documents lengths of int64, then the tokens, each document with its end
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core.disk import drafted
from weft.data.byte_tokenizer import TokenArray
from weft.data.documents import Document
from weft.data.samples import SampleEncoder
from weft.data.tokenizers import Tokenizer
from weft.data.words import word_dtype

# Large enough to pay for the start of a process, small enough that a kill loses seconds and memory stays small.
PART_DOCUMENTS = 1 << 16
PART_CHARACTERS = 4 << 20
# Per call of a tokenizer: enough for its threads; its lists take many times the size of the text.
BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class PartHeader:
    """The key and checksums of the documents, and the size of the part."""

    key: str
    documents_crc32: int
    num_documents: int
    num_tokens: int
    payload_crc32: int


@dataclass(frozen=True)
class TokenPart:
    """Tokens of documents, without empty ones; every length includes the end token of its document."""

    lengths: NDArray[np.int64]
    tokens: TokenArray


def divide(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents of each part: a function of the documents only, so that every build has the same parts."""
    return _grouped(documents, num_documents=PART_DOCUMENTS, characters=PART_CHARACTERS)


def encode_part(documents: Sequence[Document], *, tokenizer: Tokenizer | SampleEncoder) -> TokenPart:
    """Encode each document. Text gets one end token, never a second one; samples have the ends of their template."""
    has_mask, end = isinstance(tokenizer, SampleEncoder), tokenizer.end_of_document
    dtype = word_dtype(tokenizer.vocab_size, has_mask=has_mask)
    chunks: list[TokenArray] = []
    lengths: list[int] = []
    last = np.array([end], dtype=dtype)
    for batch in _grouped(documents, num_documents=BATCH_DOCUMENTS, characters=BATCH_CHARACTERS):
        for tokens in tokenizer.encode_batch(batch):
            if len(tokens):
                is_ended = has_mask or tokens[-1] == end
                chunks += [tokens.astype(dtype)] if is_ended else [tokens.astype(dtype), last]
                lengths.append(len(tokens) + (not is_ended))
    tokens = np.concatenate(chunks) if chunks else np.empty(0, dtype=dtype)
    return TokenPart(lengths=np.array(lengths, dtype=np.int64), tokens=tokens)


def write_part(path: Path, part: TokenPart, *, key: str, documents_crc32: int) -> None:
    """Write the part atomically: two builders may write the same one."""
    payload = part.lengths.tobytes() + part.tokens.tobytes()
    header = PartHeader(
        key=key,
        documents_crc32=documents_crc32,
        num_documents=len(part.lengths),
        num_tokens=len(part.tokens),
        payload_crc32=zlib.crc32(payload),
    )
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with drafted(draft, path), draft.open("xb") as file:
        file.write(json.dumps(asdict(header)).encode() + b"\n")
        file.write(payload)


def is_kept(path: Path, *, key: str, documents_crc32: int) -> bool:
    """Whether an earlier build completed this part, of the same documents."""
    try:
        with path.open("rb") as file:
            header = PartHeader(**json.loads(file.readline()))
            is_same = (header.key, header.documents_crc32) == (key, documents_crc32)
            return is_same and zlib.crc32(file.read()) == header.payload_crc32
    except (OSError, ValueError, TypeError):
        return False


def read_part(path: Path, *, dtype: np.dtype[np.unsignedinteger]) -> TokenPart:
    """Read a part that this build wrote or found complete."""
    with path.open("rb") as file:
        header = PartHeader(**json.loads(file.readline()))
        lengths = np.frombuffer(file.read(8 * header.num_documents), dtype=np.int64)
        return TokenPart(lengths=lengths, tokens=np.frombuffer(file.read(), dtype=dtype))


def checksum(documents: Sequence[Document]) -> int:
    """A checksum of the text and of the ends of the documents."""
    found = 0
    for document in documents:
        data = document.encode("utf-8", errors="surrogatepass") if isinstance(document, str) else document
        found = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), found))
    return found


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
