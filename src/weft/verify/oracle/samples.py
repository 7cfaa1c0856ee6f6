"""Samples of a run (chats, completions, documents not cut by rows) and the rows they are in, from their tokens.

A sample of n tokens is n - 1 inputs; the label of an input is the next token if that counts. Truncation is done again
here. A row is one sample, or several with positions that restart, then padding without labels. How samples are chosen
for a row is not judged: each must be in some row of an epoch, once, with its own labels.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.verify.oracle.documents import open_tokenizer
from weft.verify.oracle.facts import CorpusFacts, RankShare, Rows, Tables
from weft.verify.oracle.streams import IGNORED

MOST_READ_AGAIN = 200  # rows that are rendered again by transformers
Sample = tuple[tuple[int, ...], tuple[int, ...]]  # inputs, labels


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

    @property
    def num_rows(self) -> int:
        return self.share.num_rows

    @cached_property
    def samples(self) -> Counter[Sample]:
        """Every sample that fits, or what truncation leaves of it, with its count."""
        pieces = (piece for begin, end in self.share.documents for piece in self._pieces(begin, end))
        made = ((self.tokens[begin:end], self.counted[begin:end]) for begin, end in pieces)
        found = ((tuple(t[:-1].tolist()), tuple(np.where(c, t, IGNORED)[1:].tolist())) for t, c in made if len(t) > 1)
        return Counter(sample for sample in found if any(label != IGNORED for label in sample[1]))

    def batch_at(self, indices: Sequence[int]) -> Rows:
        """Samples of the run by number, as it reads them; each must be known."""
        read = [self.share.batch(index, dp_rank=0, dp_degree=1) for index in indices]
        fields = {key: np.concatenate([part[key][:1] for part in read]) for key in read[0]}
        self.require_known(fields, len(indices), place=f"sample {indices[0]}")
        return fields

    def require_known(self, batch: Rows, count: int, *, place: str) -> Counter[Sample]:
        """The samples of the first rows of a batch; raise for one that the corpus does not have."""
        found: Counter[Sample] = Counter()
        for row in range(count):
            for sample in self._of_row(batch, row):
                if sample not in self.samples:
                    raise WrongSampleError(
                        self._nearest(sample), _shown(sample), place=f"{place}, row {row} of its batch"
                    )
                found[sample] += 1
        return found

    def _of_row(self, batch: Rows, row: int) -> Iterator[Sample]:
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
            known = self._by_row.get((tuple(inputs.tolist()), tuple(labels.tolist())))
            borders = [0, known if known is not None else self.length]
        for begin, end in itertools.pairwise(borders):
            is_padding = (labels[begin:end] == IGNORED).all() and (inputs[begin:end] == self.end).all()
            if end > begin and not (is_padding and self.is_packed):
                yield tuple(inputs[begin:end].tolist()), tuple(labels[begin:end].tolist())

    @cached_property
    def _by_row(self) -> dict[Sample, int]:
        """Padded samples, with their own length."""
        rest = {sample: self.length - len(sample[0]) for sample in self.samples}
        return {(a + (self.end,) * n, b + (IGNORED,) * n): len(a) for (a, b), n in rest.items()}

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

    def _nearest(self, sample: Sample) -> str:
        same = next((known for known in self.samples if known[0] == sample[0]), None)
        return f"labels {list(same[1][:8])}" if same is not None else "a sample of the corpus"


def check_epoch(stream: SampleStream, *, rows: int, num_epochs: int | None, dp_degree: int) -> str:
    """Check that an epoch has every sample once, that data ends without labels, and the shares of ranks."""
    found: Counter[Sample] = Counter()
    for position in range(0, stream.num_rows, rows):
        batch = stream.share.batch(position, dp_rank=0, dp_degree=1)
        count = min(rows, stream.num_rows - position)
        found += stream.require_known(batch, count, place=f"sample {position}")
        parts = [stream.share.batch(position, dp_rank=rank, dp_degree=dp_degree) for rank in range(dp_degree)]
        for key, values in batch.items():
            if not np.array_equal(np.concatenate([part[key] for part in parts]), values):
                raise WrongSampleError(f"{key} of the global batch", "others", place=f"sample {position} over ranks")
    if found != stream.samples:
        wrong = next(iter((found - stream.samples) + (stream.samples - found)))
        counts = f"{stream.samples[wrong]} times", f"{found[wrong]} times"
        raise WrongSampleError(*counts, place=f"an epoch, the sample {_shown(wrong)}")
    if num_epochs is not None:
        total = num_epochs * stream.num_rows
        last = (total - 1) // rows * rows
        labels = stream.share.batch(last, dp_rank=0, dp_degree=1)["labels"]
        if (labels[total - last :] != IGNORED).any():
            raise WrongSampleError("no labels in the rows that pad a last batch", "labels", place=f"sample {last}")
    return f"every sample of an epoch once: {sum(found.values())} in {stream.num_rows} rows"


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


def _shown(sample: Sample) -> str:
    return f"inputs {list(sample[0][:8])}, labels {list(sample[1][:8])}"
