"""Checks rows of training and evaluation against the corpus: every sample of an epoch once, labels are next tokens.

A long epoch is checked in evenly spaced windows; a row that occurs twice in any of them is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.verify.oracle.documents import Beginning
from weft.verify.oracle.facts import CorpusFacts, MixtureFacts, RankShare, Rows, Tables
from weft.verify.oracle.mixtures import MixedStream, check_mixture
from weft.verify.oracle.pairs import PairStream, check_pairs_again
from weft.verify.oracle.samples import SampleStream, WrongSampleError, check_epoch, check_rendered, check_shares
from weft.verify.oracle.streams import IGNORED, MOST_ROWS, Hashes, Stream, windows
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle data", 12
SHARED_BATCHES = 4  # batches that are also read as each data-parallel rank
ORDERED_ROWS = 64  # fewer rows may have the same order twice by chance
SHOWN = 6


class WrongRowsError(Exception):
    """The first error in the data, as a finding."""

    def __init__(self, expected: str, found: str, *, place: str) -> None:
        super().__init__(place)
        self.finding = Finding(rule=RULE, expected=expected, found=found, coordinates=place)


def check_data(
    run: Tables,
    corpus: CorpusFacts,
    beginning: Beginning | str,
    streams: tuple[Stream | SampleStream, Stream | SampleStream | None],
    *,
    dp_degree: int,
) -> Check:
    """Check the data. `beginning`: the documents read again, or why not; `streams`: training and held out."""
    data, rows = run["data"], int(run["train"]["global_batch"])
    if isinstance(streams[0], SampleStream):
        return _check_samples(data, corpus, streams[0], streams[1], rows=rows, dp_degree=dp_degree)
    try:
        read = _check_stored(corpus, beginning)
        _check_shares(float(data["eval_fraction"]), corpus)
        training = Epoch(share=corpus.training, stream=streams[0], rows=rows, num_epochs=data.get("epochs"))
        details = [training.check(dp_degree=dp_degree)]
        if corpus.held_out is not None and isinstance(streams[1], Stream):
            details.append(_check_held_out(corpus.held_out, streams[1], rows=rows))
    except WrongRowsError as wrong:
        return Check.failed(NAME, wrong.finding)
    return Check.passed(NAME, "; ".join([*details, read]))


def _check_samples(
    data: Tables, corpus: CorpusFacts, training: SampleStream, held_out: Any, *, rows: int, dp_degree: int
) -> Check:
    """Check samples that are not cut by rows."""
    try:
        check_shares(corpus)
        details = [check_epoch(training, rows=rows, num_epochs=data.get("epochs"), dp_degree=dp_degree)]
        if isinstance(held_out, SampleStream) and held_out.num_rows:
            details.append(f"held out: {check_epoch(held_out, rows=rows, num_epochs=1, dp_degree=1)}")
        is_paired = isinstance(training, PairStream)
        details.append(check_pairs_again(data, corpus) if is_paired else check_rendered(data, corpus))
    except WrongSampleError as wrong:
        finding = Finding(rule=RULE, expected=wrong.expected, found=wrong.found, coordinates=wrong.place)
        return Check.failed(NAME, finding)
    return Check.passed(NAME, "; ".join(details))


def check_mixed(
    run: Tables,
    facts: MixtureFacts,
    beginnings: Sequence[Beginning | str],
    streams: tuple[MixedStream, MixedStream | None],
    held_out: Sequence[Stream | SampleStream | None],
    *,
    dp_degree: int,
) -> Check:
    """Check each source of a mixture as data of its own, then the rows that are drawn from them."""
    details = []
    for source, beginning, training, other in zip(facts.sources, beginnings, streams[0].sources, held_out, strict=True):
        alone = check_data(
            {**run, "data": source.data}, source.corpus, beginning, (training.stream, other), dp_degree=dp_degree
        )
        if not alone.ok:
            return alone
        details.append(f"{source.data['source']}: {alone.detail}")
    rows, epochs = int(run["train"]["global_batch"]), run["data"].get("epochs")
    try:
        drawn = check_mixture(facts, *streams, rows=rows, num_epochs=epochs, dp_degree=dp_degree)
    except WrongSampleError as wrong:
        finding = Finding(rule=RULE, expected=wrong.expected, found=wrong.found, coordinates=wrong.place)
        return Check.failed(NAME, finding)
    return Check.passed(NAME, "; ".join([drawn, *details]))


def _check_stored(corpus: CorpusFacts, beginning: Beginning | str) -> str:
    """Compare the cached tokens with those of the documents."""
    if len(corpus.tokens) and int(corpus.tokens.max()) >= corpus.vocab_size:
        raise WrongRowsError(
            f"tokens below {corpus.vocab_size}", str(int(corpus.tokens.max())), place="the stored tokens"
        )
    if isinstance(beginning, str):
        return f"tokens as stored: {beginning}"
    again, count = beginning.tokens, len(beginning.tokens)
    stored = corpus.tokens[:count].astype(np.int64)
    differs = np.flatnonzero(stored != again[: len(stored)])
    if len(differs):
        at = int(differs[0])
        document = int((again[:at] == corpus.end_of_document).sum())
        raise WrongRowsError(
            _shown(again[at:]), _shown(stored[at:]), place=f"token {at} of the corpus, in document {document}"
        )
    if len(stored) < count or (beginning.is_complete and len(corpus.tokens) != count):
        raise WrongRowsError(f"{count} tokens", f"{len(corpus.tokens)} tokens", place="the stored tokens")
    what = "all" if beginning.is_complete else "the first"
    return f"{what} {beginning.num_documents} documents read and tokenised again"


def _check_shares(fraction: float, corpus: CorpusFacts) -> None:
    """Check that each document is in exactly one of training and held out, and ranges end where documents end."""
    held_out = list(corpus.held_out.ranges) if corpus.held_out is not None else []
    at, place = 0, "training and held-out documents"
    for begin, end in sorted([*corpus.training.ranges, *held_out]):
        if begin != at:
            what = "held out and trained on" if begin < at else "in neither share"
            raise WrongRowsError("every document in one share", f"tokens {begin} to {at} {what}", place=place)
        if corpus.tokens[end - 1] != corpus.end_of_document:
            raise WrongRowsError(
                "a document's end", f"token {int(corpus.tokens[end - 1])}", place=f"{place}, token {end - 1}"
            )
        at = end
    if at != len(corpus.tokens):
        raise WrongRowsError("every document in one share", f"tokens from {at} on in neither", place=place)
    ends = np.flatnonzero(np.asarray(corpus.tokens) == corpus.end_of_document)
    found = sum(int(np.searchsorted(ends, end) - np.searchsorted(ends, begin)) for begin, end in held_out)
    expected = fraction * len(ends) if len(ends) > 1 else 0.0
    allowed = 6.0 * (len(ends) * fraction * (1.0 - fraction)) ** 0.5 + 1.0
    if abs(found - expected) > allowed or (expected > 0 and not 0 < found < len(ends)):
        raise WrongRowsError(f"about {expected:.0f} of {len(ends)} documents held out", str(found), place=place)


def _check_held_out(share: RankShare, stream: Stream, *, rows: int) -> str:
    """Check that held-out rows come in order, from the first."""
    _require_count(share, stream, place="held-out rows")
    num_checked = min(stream.num_rows, MOST_ROWS)
    for position in range(0, num_checked, rows):
        batch = share.batch(position, dp_rank=0, dp_degree=1)
        count = min(rows, stream.num_rows - position)
        _compare(batch, stream, stream.rows(range(position, position + count)), place=f"held-out sample {position}")
        _require_empty(batch, count, place=f"held-out sample {position}")
    return f"{num_checked} of {stream.num_rows} held-out rows, never trained on"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Checks the order of training rows."""

    share: RankShare
    stream: Stream
    rows: int  # of a global batch
    num_epochs: int | None

    def check(self, *, dp_degree: int) -> str:
        _require_count(self.share, self.stream, place="training rows")
        seen, stream = [], self.stream
        for begin, end in windows(stream.num_rows, rows=self.rows):
            seen.append(self._read(begin, end - begin))
        hashes = np.concatenate(seen)
        self._require_once(hashes)
        self._check_end()
        self._check_ranks(dp_degree=dp_degree)
        what = "every row of an epoch once" if len(hashes) == stream.num_rows else "no row of an epoch twice"
        ranks = f", on 1 and {dp_degree} data-parallel ranks" if dp_degree > 1 else ""
        return f"{what}: {len(hashes)} of {stream.num_rows} samples{ranks}"

    def _read(self, position: int, count: int) -> Hashes:
        """Input hashes of the samples from `position` on; each must be a row of the stream, with its labels."""
        stream = self.stream
        read = [self.share.batch(at, dp_rank=0, dp_degree=1) for at in range(position, position + count, self.rows)]
        batch = {key: np.concatenate([part[key] for part in read])[:count] for key in read[0]}
        inputs, last = batch["input_ids"], batch["labels"][:, -1].copy()
        for at in np.flatnonzero(last == IGNORED):  # a document's end: its label is ignored, so take the corpus's
            row = stream.find(inputs[at])
            last[at] = stream.row(row)[-1] if row is not None else last[at]
        rows = np.concatenate([inputs, last[:, None]], axis=1).astype(np.int64)
        _compare(batch, stream, rows, place=f"sample {position}")
        hashes, known = stream.hashes_of(rows), stream.known
        strange = np.flatnonzero(known[np.searchsorted(known, hashes).clip(max=len(known) - 1)] != hashes)
        if len(strange):
            index = int(strange[0])
            raise WrongRowsError(
                self._nearest(inputs[index]), f"inputs {_shown(inputs[index])}..., last label {int(last[index])}",
                place=f"sample {position + index}",
            )  # fmt: skip
        return stream.hashes_of(inputs)

    def _nearest(self, inputs: NDArray[Any]) -> str:
        at, length = self.stream.find(inputs), self.stream.length
        if at is None:
            return f"a row of the corpus: tokens [i x {length}, i x {length} + {length + 1})"
        return f"row {at} of the corpus, which token {int(self.stream.row(at)[-1])} follows"

    def _require_once(self, hashes: Hashes) -> None:
        known, often = self.stream.counts
        unique, counts = np.unique(hashes, return_counts=True)
        extra = (counts - often[np.searchsorted(known, unique)]).clip(min=0).sum()
        if extra:
            expected = f"{len(hashes)} samples of an epoch, none twice"
            raise WrongRowsError(expected, f"{int(extra)} that came before", place="the order of training")

    def _check_end(self) -> None:
        """Check that a second epoch has another order, and that rows after the end of the data have no labels."""
        num_rows, rows = self.stream.num_rows, min(self.rows, self.stream.num_rows)
        if self.num_epochs is not None:
            total = self.num_epochs * num_rows
            last = (total - 1) // self.rows * self.rows
            _require_empty(self.share.batch(last, dp_rank=0, dp_degree=1), total - last, place=f"sample {last}")
        if self.num_epochs == 1:
            return
        self._require_once(self._read(num_rows, rows))
        first, second = (self.share.batch(at, dp_rank=0, dp_degree=1)["input_ids"][:rows] for at in (0, num_rows))
        if rows >= 4 and num_rows >= ORDERED_ROWS and np.array_equal(first, second):
            raise WrongRowsError(
                "another order in the second epoch", "that of the first", place="the order of training"
            )

    def _check_ranks(self, *, dp_degree: int) -> None:
        """Check that the ranks' rows, concatenated, are the global batch."""
        for position in range(0, self.stream.num_rows, self.rows)[: SHARED_BATCHES if dp_degree > 1 else 0]:
            full = self.share.batch(position, dp_rank=0, dp_degree=1)
            parts = [self.share.batch(position, dp_rank=rank, dp_degree=dp_degree) for rank in range(dp_degree)]
            for key, values in full.items():
                joined = np.concatenate([part[key] for part in parts])
                _require_equal(key, values, joined, f"sample {position} over {dp_degree} ranks")


def _compare(batch: Rows, stream: Stream, rows: NDArray[np.int64], *, place: str) -> None:
    """Compare inputs, labels and positions of the first rows of a batch."""
    for key, values in stream.batch(rows).items():
        if key not in batch:
            raise WrongRowsError(key, "none", place=place)
        _require_equal(key, values, batch[key][: len(rows)], place)


def _require_count(share: RankShare, stream: Stream, *, place: str) -> None:
    if share.num_rows != stream.num_rows:
        raise WrongRowsError(f"{stream.num_rows} rows of {stream.length} tokens", str(share.num_rows), place=place)


def _require_empty(batch: Rows, rows: int, *, place: str) -> None:
    if (batch["labels"][max(0, rows) :] != IGNORED).any():
        raise WrongRowsError("no labels in the rows that pad a last batch", "labels", place=place)


def _require_equal(what: str, expected: NDArray[Any], found: NDArray[Any], place: str) -> None:
    if np.array_equal(expected, found):
        return
    if expected.shape != found.shape:
        raise WrongRowsError(f"{what} of shape {expected.shape}", str(found.shape), place=place)
    row, column = (int(part[0]) for part in np.nonzero(expected != found))
    where = f"{place}, row {row} of its batch, position {column}"
    raise WrongRowsError(f"{what} {_shown(expected[row, column:])}", _shown(found[row, column:]), place=where)


def _shown(tokens: NDArray[Any]) -> str:
    return str([int(token) for token in tokens[:SHOWN]])
