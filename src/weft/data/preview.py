"""What a run is about to train on: counts of samples and tokens, and one row as text with the tokens that count.

It reads the row that the loader returns, not the source: what is shown is what is trained.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.data_spec import DataSpec
from weft.core.vocabulary import BYTES
from weft.data.balance import largest_part
from weft.data.loader import Loader
from weft.data.mixture import MixedRows
from weft.data.rows import IGNORED, SampleRows
from weft.data.streaming import StreamingLoader
from weft.data.tokenizers import Tokenizer, open_tokenizer

MOST_ROWS = 4096  # rows whose tokens are counted; of more, evenly spaced ones
MOST_TOKENS = 400  # of the row that is shown

_CUT = {
    "end": "their end is cut off",
    "start": "their start is cut off",
    "drop": "they are left out",
    "error": "an error",
    "split": "they are split",
}


@dataclass(frozen=True)
class Preview:
    """Sentences, and the first row as stretches of text with or without a loss."""

    lines: list[str]
    row: list[tuple[str, bool]]

    def plain(self) -> str:
        """The row with brackets around what counts."""
        return "".join(f"[[{text}]]" if counts else text for text, counts in self.row)


def preview_of(data: DataSpec, loader: Loader | StreamingLoader, *, num_samples: int, position: int = 0) -> Preview:
    """`num_samples`: of the whole run; `position`: the sample that comes next."""
    tokenizer = open_tokenizer(data.tokenizer or BYTES)
    batch = {key: value.numpy() for key, value in loader.batch(position).items()}
    first = {key: values[0] for key, values in batch.items()}
    return Preview(
        lines=[
            *_of_samples(data, loader, num_samples),
            _of_tokens(loader, num_samples),
            *_of_balance(loader, position),
        ],
        row=_stretches(first, tokenizer),
    )


def _of_samples(data: DataSpec, loader: Loader | StreamingLoader, num_samples: int) -> list[str]:
    rows = loader.rows
    if isinstance(rows, MixedRows):
        seen = loader.epochs(num_samples)
        return [
            f"{name}: {size:,} rows, {share:.1%} of the samples, {seen[name]:.2f} epochs in {num_samples:,} samples"
            for name, size, share in zip(seen, rows.sizes, rows.shares, strict=True)
        ]
    if isinstance(loader, StreamingLoader):
        first = f"{loader.num_rows:,} rows in the first window of {data.shuffle_window:,} documents ({data.format})"
        return [f"streaming: {first}"]
    if not isinstance(rows, SampleRows):
        return [f"{loader.num_rows:,} rows of {data.sequence_length} tokens, cut from one stream ({data.format})"]
    pieces, kind = rows.pieces, "pairs" if rows.per_sample == 2 else "samples"
    count = pieces.num_samples // rows.per_sample
    found = [f"{loader.num_rows:,} rows of {count:,} {kind} ({data.format}, packing {data.row_packing})"]
    if pieces.num_long:
        share, what = pieces.num_long / pieces.num_samples, _CUT[data.row_truncation]
        long = f"{pieces.num_long:,} ({share:.1%}) are longer than {data.sequence_length} tokens: {what}"
        found.append(f"{long} (data.truncation = {data.row_truncation!r})")
    if pieces.num_dropped:
        found.append(f"{pieces.num_dropped:,} are left out: too long, or no token that counts is left")
    return found


def _of_tokens(loader: Loader | StreamingLoader, num_samples: int) -> str:
    """The share of positions with a loss, of all rows; of a mixture in the samples that are drawn."""
    num_rows = num_samples if isinstance(loader.rows, MixedRows) else loader.num_rows
    chosen = np.unique(np.linspace(0, num_rows - 1, min(num_rows, MOST_ROWS)).astype(np.int64))
    if isinstance(loader, Loader) and isinstance(loader.rows, MixedRows):
        chosen = loader.rows_of(chosen)
    labels = np.concatenate(
        [loader.rows.read(part)["labels"] for part in np.array_split(chosen, -(-len(chosen) // 64))]
    )
    counted = int((labels != IGNORED).sum())
    about = "" if len(chosen) == num_rows else "about "
    total, positions = round(counted * num_rows / len(chosen)), labels.size * num_rows // len(chosen)
    return f"tokens that count: {about}{total:,} of {positions:,} positions ({counted / labels.size:.1%})"


def _of_balance(loader: Loader | StreamingLoader, position: int) -> list[str]:
    """The attention work of the busiest rank in the batch that comes next."""
    if not isinstance(loader, Loader) or not loader.balances or loader.dp_degree == 1:
        return []
    drawn = position + np.arange(loader.global_batch, dtype=np.int64)
    found, before = (
        largest_part(loader.rows.work(loader.rows_of(samples)), parts=loader.dp_degree)
        for samples in (loader.samples(position), drawn)
    )
    ranks = f"the busiest of {loader.dp_degree} data-parallel ranks"
    return [f"attention work of {ranks} in the first batch: {found:.3f} of their mean ({before:.3f} as drawn)"]


def _stretches(row: dict[str, NDArray[Any]], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The first sample of a row, without the padding behind it."""
    inputs, labels = row["input_ids"], row["labels"]
    restarts = np.flatnonzero(row["position_ids"][1:] == 0) if "position_ids" in row else np.empty(0, dtype=np.int64)
    end = int(restarts[0]) + 1 if len(restarts) else len(inputs)
    counted = np.flatnonzero(labels[:end] != IGNORED)
    end = min(int(counted[-1]) + 1 if len(counted) else end, MOST_TOKENS)
    tokens = np.concatenate(
        [inputs[:1], np.where(labels[:end] == IGNORED, np.append(inputs[1:], 0)[:end], labels[:end])]
    )
    counts = np.concatenate([[False], labels[:end] != IGNORED])
    borders = [0, *(np.flatnonzero(counts[1:] != counts[:-1]) + 1).tolist(), len(tokens)]
    pairs = itertools.pairwise(borders)
    return [(_text(tokenizer, tokens[begin:stop]), bool(counts[begin])) for begin, stop in pairs]


def _text(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> str:
    return str(tokenizer.backend.decode(tokens.tolist(), skip_special_tokens=False))
