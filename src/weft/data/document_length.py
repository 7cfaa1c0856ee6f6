"""Mean length of the document that a position of a training row is in: sum of squares over the length of the row.

Measured on the rows that the loader reads, padding included, at most MOST_ROWS of them, evenly spaced.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.core.data_spec import DataSpec
from weft.data.corpus import find_corpus_of
from weft.data.loader import Loader
from weft.data.mixture import MixedRows
from weft.data.rows import RowLayout, open_rows
from weft.data.sources import DATASET_PREFIX, open_sources
from weft.data.split import Split
from weft.data.streaming import StreamingLoader

MOST_ROWS = 4096


def document_length_of(loader: Loader | StreamingLoader) -> float:
    """Of the rows of a run; of a mixture, in the shares of its sources; of a stream, of its first window."""
    chosen = _spaced(loader.num_rows)
    if isinstance(loader, Loader) and isinstance(loader.rows, MixedRows):
        chosen = loader.rows_of(chosen)
    return float(loader.rows.work(chosen).mean()) / loader.rows.length


def find_document_length(data: DataSpec, *, cache_dir: str | Path | None = None) -> float | None:
    """Of the rows of a run whose tokens are cached; None if they are not, or come of a mixture or a stream.

    Of a dataset too: its identity would be asked of the hub."""
    named = [data.source] if isinstance(data.source, str) else data.source
    if data.sources or data.streaming or any(name.startswith(DATASET_PREFIX) for name in named):
        return None
    corpus = find_corpus_of(open_sources(data), data, cache_dir=cache_dir)
    if corpus is None or not isinstance(corpus.training, Split):
        return None
    rows = open_rows(corpus.training, RowLayout.of(data))
    return float(rows.work(_spaced(rows.num_rows)).mean()) / rows.length if rows.num_rows else None


def _spaced(num_rows: int) -> np.typing.NDArray[np.int64]:
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, MOST_ROWS)).astype(np.int64))
