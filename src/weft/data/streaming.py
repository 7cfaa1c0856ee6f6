"""Streaming: data that is tokenised while it is trained on, a window of documents at a time.

Window k of an epoch is the next `shuffle_window` documents of the sources. Its tokens are a small corpus (cached, built
by one process, as any), its rows are permuted by (seed, number of the window), and its store is deleted when it is
passed. So the order is a function of the seed and the samples consumed, and the place to continue from is (window,
first sample, cursor): `state`, which checkpoints keep. Held-out documents are of the first window.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.data_spec import DataSpec
from weft.core.errors import DataError
from weft.data.balance import balanced_order
from weft.data.building import BuildProgress
from weft.data.corpus import Corpus, open_corpus_of
from weft.data.document_stream import Cursor, DocumentStream, Make
from weft.data.documents import Document
from weft.data.loader import require_share
from weft.data.order import permute
from weft.data.rows import IGNORED, RowLayout, RowTable, open_rows
from weft.data.sources import open_sources
from weft.data.split import Split

KEPT = 2  # windows before the current one: ranks are at most a step apart


@dataclass(frozen=True)
class WindowSource:
    """The documents of one window, as a source."""

    stream: list[Any]  # its identity
    begin: Cursor
    makes: list[Make]
    name: str = "a window of the stream"

    def identity(self) -> list[Any]:
        return ["window", self.stream, self.begin.as_dict(), len(self.makes)]

    def documents(self) -> Iterator[Document]:
        return (make() for make in self.makes)

    def size_bytes(self) -> None:
        return None


@dataclass(frozen=True)
class Window:
    """A window that was reached: its number over all epochs, its first sample, and where its documents begin."""

    number: int
    epoch: int
    first: int
    begin: Cursor
    end: Cursor
    split: Split
    rows: RowTable | None  # None: no row of it is left
    path: Path

    @property
    def behind(self) -> int:
        """The sample behind its last."""
        return self.first + (self.rows.num_rows if self.rows is not None else 0)


class StreamingLoader:
    """Batches of one rank, as `Loader` gives them."""

    def __init__(
        self, data: DataSpec, *, seed: int, global_batch: int, dp_rank: int = 0, dp_degree: int = 1,
        cache_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        require_share(global_batch, dp_rank=dp_rank, dp_degree=dp_degree)
        self.data, self.seed, self.global_batch = data, seed, global_batch
        self.dp_rank, self.dp_degree = dp_rank, dp_degree
        self.layout = RowLayout.of(data)
        self._cache_dir = cache_dir
        self._stream = DocumentStream(open_sources(data))
        self._windows: list[Window] = []
        self._end: int | None = None  # the number of samples, once the last epoch has ended
        self._advance()
        first = self._windows[0]
        if first.rows is None:
            raise DataError(
                "the first window of the stream has no row to train on",
                hint="raise data.shuffle_window or data.sequence_length, or change data.truncation",
            )
        self.rows: RowTable = first.rows
        self.split = first.split

    @property
    def num_rows(self) -> int:
        """Of the first window: the others are not known yet."""
        return self.rows.num_rows

    def has_batch(self, position: int) -> bool:
        return position >= 0 and self._reach(position)

    def batch(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's rows of the global batch that begins at sample `position`."""
        if not self.has_batch(position):
            raise IndexError(f"there is no batch at sample {position} of {self._end}")
        share = self.global_batch // self.dp_degree
        samples = self.samples(position)[self.dp_rank * share : (self.dp_rank + 1) * share]
        parts = [self._read(int(sample)) for sample in samples]
        self._forget(position)
        return {key: torch.from_numpy(np.concatenate([part[key] for part in parts])) for key in parts[0]}

    def samples(self, position: int) -> NDArray[np.int64]:
        """The samples of the global batch that begins at `position`, in the order of its rows."""
        samples = position + np.arange(self.global_batch, dtype=np.int64)
        if not self.data.balances or not self._reach(int(samples[-1])):
            return samples
        work = [table.work(row)[0] for table, row in map(self._row, samples.tolist())]
        return samples[balanced_order(np.array(work, dtype=np.int64))]

    def whole_batch(self, position: int) -> dict[str, torch.Tensor]:
        """The rows of all ranks, for inspection."""
        alone = copy.copy(self)
        alone.dp_rank, alone.dp_degree = 0, 1
        return alone.batch(position)

    def epochs(self, position: int) -> dict[str, float]:
        """Whole passes over the data; how long a pass is, is known only at its end."""
        window = next((one for one in reversed(self._windows) if one.first <= position), self._windows[0])
        return {"data": float(window.epoch)}

    def state(self, position: int) -> dict[str, Any] | None:
        """Where to continue from at this sample."""
        if not self._reach(position):
            return None
        window = self._window_of(position)
        return {"number": window.number, "epoch": window.epoch, "first": window.first, "begin": window.begin.as_dict()}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue at a state; without one the stream is read again from its start."""
        if state is not None:
            begin = Cursor(**state["begin"])
            self._windows, self._end = [], None
            self._require(self._open(state["number"], state["epoch"], state["first"], begin))

    def _read(self, sample: int) -> dict[str, NDArray[np.int64]]:
        is_filler = not self._reach(sample)
        table, row = self._row(sample, is_filler=is_filler)
        batch = table.read(row)
        if is_filler:
            batch["labels"][:] = IGNORED
        return batch

    def _row(self, sample: int, *, is_filler: bool = False) -> tuple[RowTable, NDArray[np.int64]]:
        """The rows of the sample's window, and the number of its row there, as an array."""
        window = self._windows[-1] if is_filler else self._window_of(sample)
        if window.rows is None:
            window = next(one for one in reversed(self._windows) if one.rows is not None)
        assert window.rows is not None  # the line above
        index = np.array([0 if is_filler else sample - window.first], dtype=np.int64)
        return window.rows, permute(index, size=window.rows.num_rows, seed=self.seed, epoch=window.number)

    def _reach(self, sample: int) -> bool:
        """Open windows up to the sample's; False if the data ends before."""
        while self._end is None and self._windows[-1].behind <= sample:
            self._advance()
        return self._end is None or sample < self._end

    def _advance(self) -> None:
        """Open the next window, of the next epoch after the last one."""
        if not self._windows:
            self._require(self._open(0, 0, 0, Cursor()))
            return
        last = self._windows[-1]
        following = self._open(last.number + 1, last.epoch, last.behind, last.end)
        if following is None and last.epoch + 1 == self.data.epochs:
            self._end = last.behind
            return
        self._require(following or self._open(last.number + 1, last.epoch + 1, last.behind, Cursor()))

    def _require(self, window: Window | None) -> None:
        if window is None:
            raise DataError("the stream has no document", hint="check data.source")
        self._windows.append(window)

    def _open(self, number: int, epoch: int, first: int, begin: Cursor) -> Window | None:
        """None: no document is left."""
        makes, end = self._stream.window(begin, self.data.shuffle_window)
        if not makes:
            return None
        source = WindowSource(self._stream.identity(), begin, makes)
        corpus = _corpus_of(self.data, source, cache_dir=self._cache_dir)
        assert isinstance(corpus.training, Split)  # of one source
        rows = open_rows(corpus.training, self.layout)
        return Window(number, epoch, first, begin, end, corpus.training, rows if rows.num_rows else None, corpus.path)

    def _window_of(self, sample: int) -> Window:
        return next(one for one in reversed(self._windows) if one.first <= sample < one.behind)

    def _forget(self, position: int) -> None:
        """Delete the stores of windows that are passed; the first has the held-out documents."""
        passed = [at for at, one in enumerate(self._windows) if one.behind <= position][:-KEPT]
        for at in reversed(passed):
            window = self._windows.pop(at)
            if window.begin != Cursor():
                window.path.unlink(missing_ok=True)


def open_first_window(data: DataSpec, *, cache_dir: str | Path | None, progress: BuildProgress | None) -> Corpus:
    """The corpus of the first window, which also has the held-out documents."""
    stream = DocumentStream(open_sources(data))
    makes, _ = stream.window(Cursor(), data.shuffle_window)
    return _corpus_of(data, WindowSource(stream.identity(), Cursor(), makes), cache_dir=cache_dir, progress=progress)


def _corpus_of(
    data: DataSpec, source: WindowSource, *, cache_dir: str | Path | None, progress: BuildProgress | None = None
) -> Corpus:
    if source.begin != Cursor():
        data = data.model_copy(update={"eval_fraction": 0.0})
    return open_corpus_of([source], data, cache_dir=cache_dir, progress=progress)
