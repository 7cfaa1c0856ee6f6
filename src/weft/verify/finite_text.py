"""A small text that does not divide into global batches: rows to train on, and held-out rows made without a loader.

Two documents of bytes; every split holds out one. Each has one and a half global batches. The last half batch of
held-out rows has letters that training never sees: counting them twice, or not at all, changes the evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.data.split import held_out_documents
from weft.verify.run_trace import Tensors

EVAL_FRACTION = 0.5
_TRAINED, _OTHER, _NUM_LETTERS = b"a"[0], b"!"[0], 23


@dataclass(frozen=True, kw_only=True)
class FiniteText:
    rows: int  # of the global batch
    length: int

    @property
    def tail(self) -> int:
        """Rows of the last, partial batch."""
        return max(1, self.rows // 2)

    @property
    def tokens(self) -> list[int]:
        """Tokens with a loss, by step of one epoch."""
        return [self.rows * self.length, self.tail * self.length]

    @property
    def data(self) -> dict[str, Any]:
        return {"format": "text"}

    def write(self, folder: Path) -> None:
        """Write the two documents; the split decides which one is held out."""
        folder.mkdir(exist_ok=True)
        held_out = int(held_out_documents(2, fraction=EVAL_FRACTION)[0])
        trained = _letters(_TRAINED, (self.rows + self.tail) * self.length + 1)
        for index in range(2):
            (folder / f"{index}.txt").write_bytes(self._held_out() if index == held_out else trained)

    def evaluation(self, *, end_of_document: int, has_positions: bool) -> list[Tensors]:
        """The held-out rows in global batches, the last one partial."""
        tokens = torch.tensor([*self._held_out(), end_of_document])
        rows = torch.arange(self.rows + self.tail)[:, None] * self.length + torch.arange(self.length)
        batch = {"input_ids": tokens[rows], "labels": tokens[rows + 1]}
        if has_positions:
            batch["position_ids"] = torch.arange(self.length).expand_as(rows)
        ranges = (slice(0, self.rows), slice(self.rows, None))
        return [{key: value[part] for key, value in batch.items()} for part in ranges]

    def _held_out(self) -> bytes:
        return _letters(_TRAINED, self.rows * self.length) + _letters(_OTHER, self.tail * self.length)


def _letters(first: int, count: int) -> bytes:
    return bytes(first + index % _NUM_LETTERS for index in range(count))
