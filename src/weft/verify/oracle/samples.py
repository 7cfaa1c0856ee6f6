"""Samples of a run (chats, completions, documents not cut by rows) and the rows they are in, from their tokens.

A sample of n tokens is n - 1 inputs; the label of an input is the next token if that counts. Truncation is done again
here. A row is one sample, or several with positions that restart, then padding without labels. How samples are chosen
for a row is not judged: each must be in some row of an epoch, once, with its own labels.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from weft.verify.oracle.documents import open_tokenizer
from weft.verify.oracle.facts import CorpusFacts, RankShare, Rows, Tables
from weft.verify.oracle.streams import IGNORED, Tokens, windows

MOST_READ_AGAIN = 200  # rows that are rendered again by transformers
Key = bytes  # the digest of a sample: its inputs and labels


class WrongSampleError(Exception):
    """The first wrong sample: what was expected and found, and where."""

    def __init__(self, expected: str, found: str, *, place: str) -> None:
        super().__init__(place)
        self.expected, self.found, self.place = expected, found, place


@dataclass(frozen=True, kw_only=True)
class SampleStream:
    """The samples of a share, and its rows as the run reads them."""

    share: RankShare
    tokens: NDArray[np.int64]  # of the whole corpus
    counted: NDArray[np.bool_]
    length: int  # S
    end: int  # of padding
    truncation: str
    is_packed: bool

    rows_per_sample: ClassVar[int] = 1

    @property
    def num_rows(self) -> int:
        return self.share.num_rows

    @property
    def samples(self) -> Counter[Key]:
        """Every sample that fits, or what truncation leaves of it, with its count."""
        return self._known[0]

    @property
    def num_inputs(self) -> int:
        """Positions that samples fill."""
        counts, places = self._known
        return sum(counts[key] * (end - begin - 1) for key, (begin, end) in places.items())

    @cached_property
    def _known(self) -> tuple[Counter[Key], dict[Key, tuple[int, int]]]:
        """The samples, and where in the corpus each is."""
        counts: Counter[Key] = Counter()
        places: dict[Key, tuple[int, int]] = {}
        for begin, end in self._all_pieces():
            inputs, labels = self._sample(begin, end)
            if (labels != IGNORED).any():
                key = key_of(inputs, labels)
                counts[key] += 1
                places[key] = begin, end
        return counts, places

    def _sample(self, begin: int, end: int) -> tuple[Tokens, Tokens]:
        tokens = self.tokens[begin:end]
        return tokens[:-1], np.where(self.counted[begin:end], tokens, IGNORED)[1:]

    def shown(self, key: Key) -> str:
        """The beginning of a known sample."""
        return _shown(*self._sample(*self._known[1][key]))

    def batch_at(self, indices: Sequence[int]) -> Rows:
        """So many samples of the run from the first on, as it reads them; each must be known."""
        fields = read_samples(self.share, indices, rows_per_sample=self.rows_per_sample)
        self.require_known(fields, len(indices), place=f"sample {indices[0]}")
        return fields

    def require_known(self, batch: Rows, count: int, *, place: str) -> Counter[Key]:
        """The samples of the first rows of a batch; raise for one that the corpus does not have."""
        found: Counter[Key] = Counter()
        for row in range(count):
            for inputs, labels in self._of_row(batch, row):
                key = key_of(inputs, labels)
                if key not in self.samples:
                    raise WrongSampleError(
                        self._nearest(inputs), _shown(inputs, labels), place=f"{place}, row {row} of its batch"
                    )
                found[key] += 1
        return found

    def _of_row(self, batch: Rows, row: int) -> Iterator[tuple[Tokens, Tokens]]:
        inputs, labels = batch["input_ids"][row], batch["labels"][row]
        if "position_ids" in batch:
            positions = batch["position_ids"][row]
            borders = [*np.flatnonzero(positions == 0).tolist(), self.length]
            counts_up = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(borders)])
            if borders[0] != 0 or not np.array_equal(positions, counts_up):
                raise WrongSampleError(
                    "positions that count up from 0", str(positions[:8].tolist()), place=f"row {row}"
                )
        elif self.is_packed:
            raise WrongSampleError("position_ids of packed samples", "none", place=f"row {row}")
        else:
            known = self._by_row.get(key_of(inputs, labels))
            borders = [0, known if known is not None else self.length]
        for begin, end in itertools.pairwise(borders):
            is_padding = (labels[begin:end] == IGNORED).all() and (inputs[begin:end] == self.end).all()
            if end > begin and not (is_padding and self.is_packed):
                yield inputs[begin:end], labels[begin:end]

    @cached_property
    def _by_row(self) -> dict[Key, int]:
        """Padded samples, with their own length."""
        found = {}
        for begin, end in self._known[1].values():
            inputs, labels = self._sample(begin, end)
            rest = (0, self.length - len(inputs))
            padded = np.pad(inputs, rest, constant_values=self.end), np.pad(labels, rest, constant_values=IGNORED)
            found[key_of(*padded)] = len(inputs)
        return found

    def _all_pieces(self) -> Iterator[tuple[int, int]]:
        pieces = (piece for begin, end in self.share.documents for piece in self._pieces(begin, end))
        return ((begin, end) for begin, end in pieces if end - begin > 1)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        most = self.length + 1
        if end - begin <= most:
            yield begin, end
        elif self.truncation == "end":
            yield begin, begin + most
        elif self.truncation == "start":
            yield end - most, end
        elif self.truncation == "split":
            yield from ((at, min(at + most, end)) for at in range(begin, end - 1, self.length))

    def _nearest(self, inputs: Tokens) -> str:
        for begin, end in self._all_pieces():
            known, labels = self._sample(begin, end)
            if np.array_equal(known, inputs):
                return f"labels {labels[:8].tolist()}"
        return "a sample of the corpus"


def read_samples(share: RankShare, indices: Sequence[int], *, rows_per_sample: int = 1) -> Rows:
    """The rows of so many samples of the run, from the first index on."""
    read = [share.batch(indices[0], dp_rank=0, dp_degree=1)]
    step = len(read[0]["labels"]) // rows_per_sample
    read += [share.batch(at, dp_rank=0, dp_degree=1) for at in indices[step::step]]
    count = len(indices) * rows_per_sample
    return {key: np.concatenate([part[key] for part in read])[:count] for key in read[0]}


def check_epoch(stream: SampleStream, *, rows: int, num_epochs: int | None, dp_degree: int) -> str:
    """Check that an epoch has every sample once, that data ends without labels, and the shares of ranks.

    Of a long epoch windows are read: no sample may then be there too often."""
    found: Counter[Key] = Counter()
    spans = list(windows(stream.num_rows, rows=rows))
    for begin, end in spans:
        for position in range(begin, end, rows):
            batch = stream.share.batch(position, dp_rank=0, dp_degree=1)
            found += stream.require_known(batch, min(rows, end - position), place=f"sample {position}")
            if len(spans) == 1 or position == begin:
                require_shares(stream.share, batch, position, dp_degree=dp_degree)
    often = found - stream.samples
    missing = stream.samples - found if len(spans) == 1 else Counter[Key]()
    for wrong in (*often, *missing):
        counts = f"{stream.samples[wrong]} times", f"{found[wrong]} times"
        raise WrongSampleError(*counts, place=f"an epoch, the sample {stream.shown(wrong)}")
    require_end(stream.share, rows=rows, num_epochs=num_epochs, rows_per_sample=stream.rows_per_sample)
    if len(spans) == 1:
        return f"every sample of an epoch once: {found.total()} in {stream.num_rows} rows"
    num_read = sum(end - begin for begin, end in spans)
    return f"no sample of an epoch too often: {found.total()} in {num_read} of {stream.num_rows} rows"


def require_end(share: RankShare, *, rows: int, num_epochs: int | None, rows_per_sample: int = 1) -> None:
    """Check that data that ends fills its last batch with rows without labels."""
    if num_epochs is None:
        return
    total = num_epochs * share.num_rows
    last = (total - 1) // rows * rows
    labels = share.batch(last, dp_rank=0, dp_degree=1)["labels"]
    if (labels[(total - last) * rows_per_sample :] != IGNORED).any():
        raise WrongSampleError("no labels in the rows that pad a last batch", "labels", place=f"sample {last}")


def require_shares(share: RankShare, batch: Rows, position: int, *, dp_degree: int) -> None:
    """Check that the ranks' rows, one after the other, are the global batch."""
    parts = [share.batch(position, dp_rank=rank, dp_degree=dp_degree) for rank in range(dp_degree)]
    for key, values in batch.items():
        if not np.array_equal(np.concatenate([part[key] for part in parts]), values):
            raise WrongSampleError(f"{key} of the global batch", "others", place=f"sample {position} over ranks")


def check_shares(corpus: CorpusFacts) -> None:
    """Check that each stored sample is in exactly one of training and held out."""
    held_out = corpus.held_out.documents if corpus.held_out is not None else []
    at = 0
    for begin, end in sorted([*corpus.training.documents, *held_out]):
        if begin != at:
            raise WrongSampleError(
                "every sample in one share", f"tokens {at} to {begin}", place="training and held out"
            )
        at = end
    if at != len(corpus.tokens):
        raise WrongSampleError(
            "every sample in one share", f"tokens from {at} on in none", place="training and held out"
        )


def check_rendered(data: Tables, corpus: CorpusFacts) -> str:
    """Render the first chats again with transformers alone, and find each assistant's text in what counts."""
    if data["format"] != "chat" or not str(data["source"]).endswith(".jsonl") or data["tokenizer"] == "bytes":
        return "samples as stored"
    documents = sorted([*corpus.training.documents, *(corpus.held_out.documents if corpus.held_out else [])])
    tokenizer = open_tokenizer(Path(str(data["tokenizer"])).expanduser())
    template = Path(data["chat_template"]).expanduser().read_text() if data["chat_template"] else None
    with Path(str(data["source"])).expanduser().open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()][:MOST_READ_AGAIN]
    for number, (row, (begin, end)) in enumerate(zip(rows, documents, strict=False), start=1):
        if "messages" not in row or not all(isinstance(message.get("content"), str) for message in row["messages"]):
            continue
        tools = row.get("tools") if isinstance(row.get("tools"), list) else None
        again = tokenizer.apply_chat_template(
            row["messages"], tools=tools or None, chat_template=template, tokenize=True, return_dict=True
        )["input_ids"]
        place = f"row {number} of {data['source']}"
        if again != corpus.tokens[begin:end].tolist():
            raise WrongSampleError(f"tokens {again[:8]}", str(corpus.tokens[begin : begin + 8].tolist()), place=place)
        _require_answers(row["messages"], tokenizer, corpus, begin, end, turns=data["train_on"], place=place)
    return f"{min(len(rows), len(documents))} chats rendered again"


def _require_answers(
    messages: Any, tokenizer: Any, corpus: CorpusFacts, begin: int, end: int, *, turns: str | None, place: str
) -> None:
    if turns == "all" or corpus.counted is None:
        return
    tokens, counted = corpus.tokens[begin:end], corpus.counted[begin:end]
    text, silent = (tokenizer.decode(tokens[chosen].tolist()) for chosen in (counted, ~counted))
    answers = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    for answer in answers[-1:] if turns == "last" else answers:
        if answer not in text:
            raise WrongSampleError(f"a loss on {answer[:40]!r}", f"one on {text[:80]!r}", place=place)
    for message in messages:
        asked = message["content"].strip()
        if message["role"] == "user" and asked not in silent and tokenizer.decode(tokens.tolist()).count(asked) == 1:
            raise WrongSampleError(f"no loss on {asked[:40]!r}", "a loss", place=place)


def key_of(inputs: NDArray[Any], labels: NDArray[Any]) -> Key:
    """A digest: a corpus has more tokens than fit into memory as Python numbers."""
    parts = (np.ascontiguousarray(part, dtype=np.int64).tobytes() for part in (inputs, labels))
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _shown(inputs: NDArray[Any], labels: NDArray[Any]) -> str:
    return f"inputs {inputs[:8].tolist()}, labels {labels[:8].tolist()}"
