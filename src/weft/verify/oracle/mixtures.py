"""The rows of a mixture: each of one of its sources, in their shares, and none of a source twice before all were drawn.

What the sources are is checked of each alone (`rows`, `samples`). How rows are drawn is not judged beyond this: after
any number of samples, source s has had its share of them, to a few; its rows come once before one comes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.verify.oracle.facts import MixtureFacts, RankShare, Rows
from weft.verify.oracle.samples import (
    Key,
    SampleStream,
    WrongSampleError,
    read_samples,
    require_end,
    require_shares,
)
from weft.verify.oracle.streams import Stream

MOST_DRAWN = 1024  # samples that are read
SHARED_BATCHES = 4  # batches that are also read as each data-parallel rank


class SourceRows:
    """Finds rows of a mixture in one of its sources."""

    def __init__(self, stream: Stream | SampleStream) -> None:
        self.stream = stream
        self._has_positions = stream.isolates if isinstance(stream, Stream) else stream.is_packed

    def members(self, batch: Rows, row: int) -> Counter[Key]:
        """What the row has of this source: the row itself, or its samples; nothing if it is of another."""
        one = {key: values[row : row + 1] for key, values in batch.items()}
        if not self._has_positions and "position_ids" in one:  # of a row that is one document to the model
            positions = one.pop("position_ids")[0]
            if not np.array_equal(positions, np.arange(len(positions))):
                return Counter()
        return _row_of(self.stream, one) if isinstance(self.stream, Stream) else _samples_of(self.stream, one)

    def often(self, key: Key) -> int:
        """How often the source has a member."""
        return _rows_like(self.stream, key) if isinstance(self.stream, Stream) else self.stream.samples[key]

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row, without padding."""
        if isinstance(self.stream, Stream):
            return float(self.stream.length)
        return max(1.0, self.stream.num_inputs / max(1, self.stream.num_rows))


@dataclass(frozen=True, kw_only=True)
class MixedStream:
    """The rows of one share of a mixture, as the run reads them; each must be of one of `sources`."""

    share: RankShare
    sources: Sequence[SourceRows]

    @property
    def num_rows(self) -> int:
        return self.share.num_rows

    def batch_at(self, indices: Sequence[int]) -> Rows:
        """As `SampleStream.batch_at`."""
        fields = read_samples(self.share, indices)
        self.require_known(fields, len(indices), place=f"sample {indices[0]}")
        return fields

    def require_known(self, batch: Rows, count: int, *, place: str) -> list[list[Counter[Key]]]:
        """For each of the first rows what every source has of it; raise if none has."""
        found = []
        for row in range(count):
            members = [source.members(batch, row) for source in self.sources]
            if not any(members):
                inputs = batch["input_ids"][row, :8].tolist()
                raise WrongSampleError("a row of one of the sources", f"inputs {inputs}", place=f"{place}, row {row}")
            found.append(members)
        return found


def check_mixture(
    facts: MixtureFacts,
    training: MixedStream,
    held_out: MixedStream | None,
    *,
    rows: int,
    num_epochs: int | None,
    dp_degree: int,
) -> str:
    """Check what is drawn in training, the shares of ranks, and that all held-out rows come once."""
    _require_count(training)
    limit = MOST_DRAWN if num_epochs is None else min(MOST_DRAWN, num_epochs * training.num_rows)
    drawn = _Drawn(training.sources, shares_of(facts, training.sources))
    for position in range(0, limit, rows):
        batch = training.share.batch(position, dp_rank=0, dp_degree=1)
        count, place = min(rows, limit - position), f"sample {position}"
        drawn.add(training.require_known(batch, count, place=place), place=place)
        if position < SHARED_BATCHES * rows:
            require_shares(training.share, batch, position, dp_degree=dp_degree)
    require_end(training.share, rows=rows, num_epochs=num_epochs)
    detail = f"{len(training.sources)} sources in their shares: {drawn.count} samples"
    if held_out is None:
        return detail
    return f"{detail}; {_check_held_out(held_out, rows=rows)}"


def shares_of(facts: MixtureFacts, sources: Sequence[SourceRows]) -> list[float]:
    """The share of each source in the samples."""
    weights = [source.weight for source in facts.sources]
    if facts.by_tokens:
        weights = [weight / source.tokens_per_row for weight, source in zip(weights, sources, strict=True)]
    return [weight / sum(weights) for weight in weights]


def _row_of(stream: Stream, one: Rows) -> Counter[Key]:
    """The row if the stream has it, with its labels."""
    known, wanted = stream.counts[0], stream.hashes_of(one["input_ids"])[0]
    at = int(np.searchsorted(known, wanted))
    found = stream.find(one["input_ids"][0], int(one["labels"][0, -1])) if wanted in known[at : at + 1] else None
    if found is None:
        return Counter()
    expected = stream.batch_at([found])
    is_same = expected.keys() == one.keys() and all(np.array_equal(expected[key], one[key]) for key in one)
    return Counter([wanted.tobytes()] * is_same)


def _rows_like(stream: Stream, key: Key) -> int:
    """The rows of the stream with these inputs."""
    known, counts = stream.counts
    return int(counts[np.searchsorted(known, np.frombuffer(key, dtype=np.uint64)[0])])


def _samples_of(stream: SampleStream, one: Rows) -> Counter[Key]:
    try:
        return stream.require_known(one, 1, place="")
    except WrongSampleError:
        return Counter()


class _Drawn:
    """What each source has had so far. A row that two sources have may be of either."""

    def __init__(self, sources: Sequence[SourceRows], shares: Sequence[float]) -> None:
        self._sources, self._shares = sources, shares
        self.count = 0
        self._least, self._most = [0] * len(sources), [0] * len(sources)
        self._seen: list[Counter[Key]] = [Counter() for _ in sources]

    def add(self, rows: Sequence[Sequence[Counter[Key]]], *, place: str) -> None:
        for members in rows:
            owners = [index for index, one in enumerate(members) if one]
            self.count += 1
            for index in owners:
                self._most[index] += 1
                self._least[index] += len(owners) == 1
        for index, source in enumerate(self._sources):
            self._require_share(index, place=place)
            if self._most[index] <= source.stream.num_rows:  # the first epoch of this source
                alone = [members[index] for members in rows if sum(map(bool, members)) == 1]
                self._require_once(index, sum(alone, Counter()), place=place)

    def _require_share(self, index: int, *, place: str) -> None:
        expected, slack = self._shares[index] * self.count, 2 + len(self._sources)
        if not self._least[index] - slack <= expected <= self._most[index] + slack:
            wanted = f"about {expected:.1f} of {self.count} samples of source {index + 1}"
            raise WrongSampleError(wanted, str(self._most[index]), place=f"{place} and before")

    def _require_once(self, index: int, added: Counter[Key], *, place: str) -> None:
        self._seen[index] += added
        for key in added:
            often, found = self._sources[index].often(key), self._seen[index][key]
            if found > often:
                wanted = f"{often} times in an epoch of source {index + 1}"
                raise WrongSampleError(wanted, f"{found} times", place=f"a row of the batch at {place}")


def _check_held_out(stream: MixedStream, *, rows: int) -> str:
    """Check that all rows of every source come once; of many, that none comes too often."""
    _require_count(stream)
    limit = min(MOST_DRAWN, stream.num_rows)
    seen: list[Counter[Key]] = [Counter() for _ in stream.sources]
    for position in range(0, limit, rows):
        batch = stream.share.batch(position, dp_rank=0, dp_degree=1)
        for members in stream.require_known(batch, min(rows, limit - position), place=f"held-out sample {position}"):
            for found, own in zip(seen, members, strict=True):
                found += own if sum(map(bool, members)) == 1 else Counter()
    for index, (source, found) in enumerate(zip(stream.sources, seen, strict=True), start=1):
        wrong = next((key for key, times in found.items() if times > source.often(key)), None)
        if wrong is not None:
            expected, place = f"{source.often(wrong)} times", f"held-out rows of source {index}"
            raise WrongSampleError(expected, f"{found[wrong]} times", place=place)
    return f"{limit} of {stream.num_rows} held-out rows, none too often"


def _require_count(stream: MixedStream) -> None:
    expected = sum(source.stream.num_rows for source in stream.sources)
    if stream.num_rows != expected:
        raise WrongSampleError(f"{expected} rows of all sources", str(stream.num_rows), place="a share of the mixture")
