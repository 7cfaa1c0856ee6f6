"""The mask of a rank's queries over whole rows, in pieces: no tensor of own times whole positions exists.

At 131,072 positions on 8 ranks such a tensor has 2 GiB, and what attention kernels add to scores has twice as much. A
model passes a `RowMask` through to attention as it does a tensor; one that computes with masks fails with it, so
`models/cp/mask_probe.py` tries before. Attention takes it piece by piece, with the keys alone that the queries of a
piece see: few of the row where there are windows or short documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode  # no public form
from torch._subclasses.fake_tensor import unset_fake_temporarily  # no public form

from weft.models.cp.mask_probe import OpaqueMask
from weft.models.cp.softmax import is_allowed

PIECE, KEY_UNIT = 1024, 64  # queries of a piece; keys of a piece begin and end at multiples of it

# (positions of queries, positions of keys) -> [rows or 1, heads or 1, queries, keys]
AskMask = Callable[[Tensor, range], Tensor]


class Piece(NamedTuple):
    """`queries`: places among the rank's own; `keys`: positions of the row, with all that these queries see."""

    queries: range
    keys: range


class RowMask(OpaqueMask):
    """`ask` gives the mask of any queries and keys, on the device of the queries; `is_fixed`: by positions alone."""

    def __init__(
        self, ask: AskMask, spans: Sequence[range], length: int, *, rows: int, device: torch.device, is_fixed: bool
    ) -> None:
        super().__init__(torch.Size((rows, 1, sum(map(len, spans)), length)))
        self._ask, self._length = ask, length
        self._own = _positions(spans, device)
        queries = list(_pieces(spans))
        if active_fake_mode() is None:
            seen = torch.stack([_seen_keys(self.at(each, range(length))) for each in queries]).tolist()
        elif is_fixed:
            seen = _foreseen(ask, spans, queries, length)
        else:  # a dry run has no documents: any key may be seen
            seen = [[0, length]] * len(queries)
        self.pieces = [Piece(each, self._aligned(*keys)) for each, keys in zip(queries, seen, strict=True)]

    def at(self, queries: range, keys: range) -> Tensor:
        return self._ask(self._own[queries.start : queries.stop], keys)

    def whole(self) -> Tensor:
        return self._ask(self._own, range(self._length))

    def _aligned(self, begin: int, end: int) -> range:
        if end <= begin:  # what kernels make of a query without keys depends on their number
            return range(self._length)
        return range(begin - begin % KEY_UNIT, min(self._length, end + -end % KEY_UNIT))


def _positions(spans: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _pieces(spans: Sequence[range]) -> Iterator[range]:
    """Of at most PIECE queries, each in one span."""
    begin = 0
    for length in map(len, spans):
        for start in range(begin, begin + length, PIECE):
            yield range(start, min(start + PIECE, begin + length))
        begin += length


def _foreseen(ask: AskMask, spans: Sequence[range], pieces: Sequence[range], length: int) -> list[list[int]]:
    """By the first and the last query of each piece: windows, chunks and causal masks allow the others no more."""
    with unset_fake_temporarily():
        own = _positions(spans, torch.device("cpu"))
        return [_seen_keys(ask(own[[each.start, each.stop - 1]], range(length))).tolist() for each in pieces]


def _seen_keys(mask: Tensor) -> Tensor:
    """[the first key that some query sees, the one behind the last]; [0, 0] of none."""
    seen = is_allowed(mask).flatten(0, 2).any(0).to(torch.int8)
    return torch.stack([seen.argmax(), len(seen) - seen.flip(0).argmax()]) * seen.max()
