"""Pairs of a run: a chosen and a rejected answer, each a padded row, from their tokens; and both read again.

A sample is a pair: its rows follow each other in a batch, the chosen one first. Truncation is done again here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from weft.verify.oracle.facts import CorpusFacts, Rows, Tables
from weft.verify.oracle.samples import MOST_READ_AGAIN, Key, SampleStream, WrongSampleError, key_of
from weft.verify.oracle.streams import IGNORED, Tokens

BYTE_END = 256


class PairStream(SampleStream):
    """See the module; keys are digests of both padded rows."""

    rows_per_sample = 2

    @cached_property
    def _known(self) -> tuple[Counter[Key], dict[Key, tuple[int, int]]]:
        counts: Counter[Key] = Counter()
        places: dict[Key, tuple[int, int]] = {}
        for pieces in self._pairs():
            rows = [self._padded(begin, end) for begin, end in pieces]
            if all((labels != IGNORED).any() for _, labels in rows):
                key = b"".join(key_of(*row) for row in rows)
                counts[key] += 1
                places[key] = pieces[0]
        return counts, places

    def require_known(self, batch: Rows, count: int, *, place: str) -> Counter[Key]:
        """The first pairs of a batch; raise for one that the corpus does not have."""
        found: Counter[Key] = Counter()
        for pair in range(count):
            rows = [(batch["input_ids"][row], batch["labels"][row]) for row in (2 * pair, 2 * pair + 1)]
            key = b"".join(key_of(*row) for row in rows)
            if key not in self.samples:
                raise WrongSampleError(
                    self._expected(rows), _shown(rows), place=f"{place}, pair {pair} of its batch, chosen and rejected"
                )
            found[key] += 1
        return found

    def _expected(self, rows: list[tuple[Tokens, Tokens]]) -> str:
        """The pair of the corpus with the same chosen inputs, or what a pair is."""
        for pieces in self._pairs():
            known = [self._padded(begin, end) for begin, end in pieces]
            if any(np.array_equal(inputs, rows[0][0]) for inputs, _ in known):
                return _shown(known)
        return "the chosen and the rejected answer of a pair of the corpus"

    def _pairs(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """What truncation leaves of each pair; without it, a pair that is too long is left out."""
        documents = list(self.share.documents)
        for chosen, rejected in zip(documents[0::2], documents[1::2], strict=True):
            left = [list(self._pieces(*answer)) for answer in (chosen, rejected)]
            if all(left) and all(end - begin > 1 for (begin, end), *_ in left):
                yield left[0][0], left[1][0]

    def _padded(self, begin: int, end: int) -> tuple[Tokens, Tokens]:
        inputs, labels = self._sample(begin, end)
        rest = (0, self.length - len(inputs))
        return np.pad(inputs, rest, constant_values=self.end), np.pad(labels, rest, constant_values=IGNORED)


def check_pairs_again(data: Tables, corpus: CorpusFacts) -> str:
    """Read the first pairs of text again, with the bytes of their texts as tokens: which answer is chosen is in no
    other place than the file."""
    source = Path(str(data["source"])).expanduser()
    if data["tokenizer"] != "bytes" or source.suffix != ".jsonl":
        return "pairs as stored"
    documents = sorted([*corpus.training.documents, *(corpus.held_out.documents if corpus.held_out else [])])
    with source.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()][:MOST_READ_AGAIN]
    answers = [(number, row, name) for number, row in enumerate(rows, start=1) for name in ("chosen", "rejected")]
    num_read = 0
    for (number, row, name), (begin, end) in zip(answers, documents, strict=False):
        if not all(isinstance(row.get(key), str) for key in ("prompt", name)):
            continue
        asked = row["prompt"].encode()
        right = [*asked, *row[name].encode(), BYTE_END]
        counted = None if corpus.counted is None else corpus.counted[begin:end]
        place = f"{name} of row {number} of {source}"
        if right != corpus.tokens[begin:end].tolist():
            raise WrongSampleError(f"tokens {right[:16]}", str(corpus.tokens[begin : begin + 16].tolist()), place=place)
        if counted is None or counted[len(asked) :].tolist() != [True] * (end - begin - len(asked)):
            raise WrongSampleError("a loss on every token of the answer", "others", place=place)
        if counted[: len(asked)].any():
            raise WrongSampleError("no loss on the prompt", "a loss", place=place)
        num_read += 1
    return f"{num_read} answers read again"


def _shown(rows: list[tuple[Tokens, Tokens]]) -> str:
    return " and ".join(str(labels[labels != IGNORED][:8].tolist()) for _, labels in rows)
