"""Pairs of answers that do not divide into global batches, in place of `finite_text`, for objectives of pairs.

Prompts and answers have fixed lengths, so every pair has the same number of tokens with a loss; their letters differ
from pair to pair. Held-out rows are made here, without a loader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.data.split import held_out_documents
from weft.verify.finite_text import EVAL_FRACTION
from weft.verify.run_trace import Tensors

IGNORED = -100
_FIRST, _NUM_LETTERS, _PROMPT = b"a"[0], 23, 2
_CHOSEN, _REJECTED = 5, 4  # letters of an answer, an end after each


@dataclass(frozen=True, kw_only=True)
class FinitePairs:
    rows: int  # pairs of the global batch
    length: int

    @cached_property
    def _held_out(self) -> tuple[int, list[int]]:
        """The number of pairs, and which of them every split holds out; both shares end in a partial batch."""
        for count in range(2 * self.rows + 1, 100 * self.rows + 100):
            held_out = [int(index) for index in held_out_documents(count, fraction=EVAL_FRACTION)]
            rests = [number % self.rows for number in (count - len(held_out), len(held_out))]
            if count - len(held_out) > self.rows < len(held_out) < 3 * self.rows and (all(rests) or self.rows == 1):
                return count, held_out
        raise ValueError(f"no number of pairs gives two shares of uneven batches of {self.rows}")

    @property
    def tokens(self) -> list[int]:
        """Tokens with a loss, by step of one epoch."""
        count, held_out = self._held_out
        trained, per_pair = count - len(held_out), sum(self._answer(is_chosen) + 1 for is_chosen in (True, False))
        return [per_pair * min(self.rows, trained - at) for at in range(0, trained, self.rows)]

    @property
    def data(self) -> dict[str, Any]:
        return {"format": "preference"}

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
            for index in range(self._held_out[0]):
                texts = {"prompt": self._prompt(index)} | dict(
                    zip(("chosen", "rejected"), self._answers(index), strict=True)
                )
                file.write(json.dumps({name: text.decode() for name, text in texts.items()}) + "\n")

    def evaluation(self, *, end_of_document: int, has_positions: bool) -> list[Tensors]:
        """The held-out pairs in global batches, the last one partial. Rows of pairs have no positions."""
        kept = self._held_out[1]
        batches = [kept[at : at + self.rows] for at in range(0, len(kept), self.rows)]
        return [self._batch(batch, end_of_document) for batch in batches]

    def _batch(self, pairs: list[int], end: int) -> Tensors:
        inputs = torch.full((2 * len(pairs), self.length), end)
        labels = torch.full_like(inputs, IGNORED)
        for place, pair in enumerate(pairs):
            for side, answer in enumerate(self._answers(pair)):
                tokens = torch.tensor([*self._prompt(pair), *answer, end])
                row, count = 2 * place + side, len(tokens) - 1
                inputs[row, :count] = tokens[:-1]
                labels[row, _PROMPT - 1 : count] = tokens[_PROMPT:]
        return {"input_ids": inputs, "labels": labels}

    def _prompt(self, pair: int) -> bytes:
        return _letters(7 * pair, _PROMPT)

    def _answers(self, pair: int) -> tuple[bytes, bytes]:
        return _letters(3 * pair + 1, self._answer(True)), _letters(5 * pair + 2, self._answer(False))

    def _answer(self, is_chosen: bool) -> int:
        """Letters of an answer, fewer in very short rows."""
        return max(1, min(_CHOSEN if is_chosen else _REJECTED, self.length - _PROMPT))


def _letters(first: int, count: int) -> bytes:
    return bytes(_FIRST + (first + index) % _NUM_LETTERS for index in range(count))
