"""Reads documents again from the files, as the guide to data describes, and tokenises them, up to a size limit.

Order: sources as listed; inside a folder or glob, files by relative path; inside a file, file order. Each document is
encoded by its tokenizer, with an end-of-document token if that adds none; empty ones are skipped.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.verify.oracle.facts import Tables

MEBIBYTE = 1 << 20
BYTE_END = 256
# Limits by cost: bytes are only copied, text is tokenised.
MOST_BYTES, MOST_TEXT = 64 * MEBIBYTE, 2 * MEBIBYTE
TEXT, KNOWN = (".txt", ".md", ".py"), (".txt", ".md", ".py", ".jsonl", ".parquet")
NOT_OF_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class NotReadAgainError(Exception):
    """The reason why the documents are not read again; tokens are then taken as stored."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Tokens of the first documents; of all documents if `is_complete`."""

    tokens: NDArray[np.int64]
    num_documents: int
    is_complete: bool


def read_beginning(data: Tables, *, end_of_document: int) -> Beginning:
    encode = _encoder(str(data["tokenizer"]))
    most = MOST_BYTES if data["tokenizer"] == "bytes" else MOST_TEXT
    chunks: list[NDArray[np.int64]] = []
    read, is_complete = 0, True
    end = np.array([end_of_document], dtype=np.int64)
    for document in _documents(data):
        if read >= most:
            is_complete = False
            break
        read += len(document)
        tokens = encode(document)
        if len(tokens):
            chunks.append(tokens if tokens[-1] == end_of_document else np.concatenate([tokens, end]))
    joined = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)
    return Beginning(tokens=joined, num_documents=len(chunks), is_complete=is_complete)


def _encoder(name: str) -> Any:
    if name == "bytes":
        return lambda document: np.frombuffer(_as_bytes(document), dtype=np.uint8).astype(np.int64)
    path = Path(name).expanduser()
    if not path.exists():
        raise NotReadAgainError(f"the tokenizer {name} is not a local file or folder")
    tokenizer = open_tokenizer(path)

    added = tokenizer.num_special_tokens_to_add()

    def encode(document: str | bytes) -> NDArray[np.int64]:
        """The tokens of the text; special tokens only count as an empty document."""
        if len(tokenizer) == BYTE_END + 1:  # an exported byte tokenizer: the bytes, UTF-8 or not
            return np.frombuffer(_as_bytes(document), dtype=np.uint8).astype(np.int64)
        tokens = tokenizer.encode(_as_bytes(document).decode("utf-8", errors="replace"), verbose=False)
        return np.asarray(tokens if len(tokens) > added else [], dtype=np.int64)

    return encode


def open_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer_config.json").is_file() and path.name in ("tokenizer.json", folder.name):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    file = path if path.is_file() else folder / "tokenizer.json"
    if not file.is_file():
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


def _as_bytes(document: str | bytes) -> bytes:
    return document.encode("utf-8", errors="replace") if isinstance(document, str) else document


def _documents(data: Tables) -> Iterator[str | bytes]:
    sources = [data["source"]] if isinstance(data["source"], str) else data["source"]
    for source in sources:
        if source.startswith("hf:"):
            raise NotReadAgainError("documents of the datasets library are not read again")
        for file in _files(source):
            yield from (document for document in _of_file(file, str(data["text_field"])) if document)


def _files(source: str) -> list[Path]:
    if source == "python-stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return [file for file in _below(root, skipped=NOT_OF_THE_LIBRARY) if file.suffix.lower() == ".py"]
    path = Path(source).expanduser()
    if path.is_dir():
        return _below(path)
    if path.exists():
        return [path]
    found: dict[Path, None] = {}
    for match in sorted(glob.glob(str(path), recursive=True)):
        for file in _below(Path(match)) if Path(match).is_dir() else [Path(match)]:
            if file.suffix.lower() in KNOWN:
                found.setdefault(file.resolve())
    return list(found)


def _below(root: Path, *, skipped: set[str] | None = None) -> list[Path]:
    """Known files under `root`, by relative path, without hidden ones."""
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in (skipped or ())]
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in KNOWN:
                names.append(os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/"))
    return [root / name for name in sorted(names)]


def _of_file(file: Path, field: str) -> Iterator[str | bytes]:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet

        for value in pyarrow.parquet.read_table(file, columns=[field]).column(0).to_pylist():
            yield value or ""
    elif suffix == ".jsonl":
        with file.open("rb") as lines:
            yield from (json.loads(line)[field] or "" for line in lines if line.strip())
    else:
        try:
            yield from _split_lines(file.read_bytes())
        except OSError:
            return  # an unreadable file of the standard library is skipped


def _split_lines(content: bytes) -> Iterator[bytes]:
    """Chunks of a file: split after the first line end beyond each MiB."""
    begin = 0
    while len(content) - begin > MEBIBYTE:
        end = content.find(b"\n", begin + MEBIBYTE) + 1
        if end == 0:
            break
        yield content[begin:end]
        begin = end
    yield content[begin:]
