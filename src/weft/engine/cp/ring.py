"""Ring attention: keys and values pass from rank to rank while each attends with what it has.

| step    | forward, rank r                              | backward, rank r                                            |
| ------- | -------------------------------------------- | ----------------------------------------------------------- |
| 0       | own keys and values                          | own; their gradients stay here                              |
| s       | those of rank r - s; the next ones arrive    | the same, and gradients of rank r - s: added, sent on       |
| the end | sums of the parts: log-sum-exp in float32    | the gradients of its own keys have been on every other rank |

Pieces of queries and keys of which no pair is allowed are not multiplied. Keys and values are not kept: the backward
passes them round again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode  # no public form
from torch.utils.weak import WeakTensorKeyDictionary

from weft.core.sequence_split import spans_of
from weft.engine.cp.blocks import Seen, Softmax, Whole, attend, exact, gradients
from weft.engine.cp.exchange import POSITIONS, Group, PendingHop, begin_hop
from weft.engine.cp.positions import Positions
from weft.engine.cp.row_masks import RowMask
from weft.models.cp.softmax import is_allowed

Pair = tuple[Tensor, Tensor]

_seen_of_masks = WeakTensorKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What one attention needs beside its tensors. `mask`: of this rank's queries and whole rows; None is causal."""

    positions: Positions
    group: Group
    scale: float
    mask: Tensor | RowMask | None

    def spans_of(self, rank: int) -> tuple[range, ...]:
        at = self.positions
        return spans_of(at.length, degree=at.degree, rank=rank, split=at.split)

    def blocks(self, source: int) -> Iterator[tuple[range, range, Seen]]:
        """Positions of own queries and of the keys of rank `source`, piece by piece, where a pair is allowed."""
        for queries, own in _places(self.positions.spans):
            for keys, other in _places(self.spans_of(source)):
                if (seen := self._seen(queries, own, other)) is not None:
                    yield queries, keys, seen

    def _seen(self, queries: range, own: range, keys: range) -> Seen | None:
        if self.mask is None:
            if keys.start > own.start:
                return None
            return Seen(is_triangle=keys.start == own.start)
        has_any, has_all = _known_of(self.mask, self.positions)[own.start, keys.start]
        if not has_any:
            return None
        return Seen() if has_all else Seen(mask=_allowed(self.mask, queries, keys))

    def passes(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Pair]]:
        """Every rank's keys and values in turn, own ones first; the next are on their way."""
        packed, degree = _packed(key, value), self.positions.degree
        for step in range(degree):
            pending = begin_hop(packed, self.group) if step < degree - 1 else None
            yield (self.positions.rank - step) % degree, _unpacked(packed, key, value)
            if pending is not None:
                packed = pending.wait()


def ring_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
    """[rows, positions, heads, width]."""
    out: Tensor = _RingAttention.apply(query, key, value, sinks, ring)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        parts: dict[int, Softmax] = {}  # by the first position of the queries
        for source, (keys, values) in ring.passes(key, value):
            for at, of, seen in ring.blocks(source):
                part = attend(_at(query, at), _at(keys, of), _at(values, of), seen, scale=ring.scale)
                parts[at.start] = _merged(parts[at.start], part) if at.start in parts else part
        out, log_sum = _in_order(parts, query, value, ring)
        if sinks is not None:
            out, log_sum = _with_sinks(Softmax(out, log_sum), sinks)
        out = out.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, sinks, out, log_sum = ctx.saved_tensors
        ring: Ring = ctx.ring
        of_query = torch.zeros_like(query, dtype=exact(query.dtype))
        own: Pair | None = None
        leaving: PendingHop | None = None
        for source, (keys, values) in ring.passes(key, value):
            of_keys, of_values = (torch.zeros_like(each, dtype=of_query.dtype) for each in (keys, values))
            for at, of, seen in ring.blocks(source):
                whole = Whole(_at(out, at), _at(gradient, at), _at(log_sum, at))
                found = gradients(_at(query, at), _at(keys, of), _at(values, of), seen, whole, scale=ring.scale)
                for total, where, part in zip((of_query, of_keys, of_values), (at, of, of), found, strict=True):
                    _at(total, where).add_(part)
            if source == ring.positions.rank:
                own = (of_keys, of_values)
                continue
            if leaving is not None:
                _add_arrived(leaving, of_keys, of_values, key, value)
            leaving = begin_hop(_packed(of_keys.to(key.dtype), of_values.to(value.dtype)), ring.group)
        assert own is not None
        assert leaving is not None
        _add_arrived(leaving, *own, key, value)
        of_sinks = None if sinks is None else _of_sinks(sinks, out, gradient, log_sum)
        return of_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), of_sinks, None


def _merged(one: Softmax, other: Softmax) -> Softmax:
    """The softmax over the keys of both."""
    log_sum = torch.logaddexp(one.log_sum, other.log_sum)
    finite = log_sum.masked_fill(log_sum == -torch.inf, 0.0)
    shares = [(each.log_sum - finite).exp().unsqueeze(-1) for each in (one, other)]
    return Softmax(one.out * shares[0] + other.out * shares[1], log_sum)


def _with_sinks(found: Softmax, sinks: Tensor) -> Softmax:
    """A number per head in each sum, without a value."""
    log_sum = torch.logaddexp(found.log_sum, sinks.to(found.log_sum).view(1, -1, 1))
    return Softmax(found.out * (found.log_sum - log_sum).exp().unsqueeze(-1), log_sum)


def _of_sinks(sinks: Tensor, out: Tensor, gradient: Tensor, log_sum: Tensor) -> Tensor:
    along = (gradient.to(log_sum.dtype) * out.to(log_sum.dtype)).sum(-1)
    shares = (sinks.to(log_sum).view(1, -1, 1) - log_sum).exp()
    return -(shares * along).sum((0, 2)).to(sinks.dtype)


def _in_order(parts: dict[int, Softmax], query: Tensor, value: Tensor, ring: Ring) -> Softmax:
    """Of all queries of the rank; a piece without keys has zeros."""
    outs, sums = [], []
    for at, _ in _places(ring.positions.spans):
        part = parts.get(at.start)
        if part is None:
            shape = (*query.shape[:2], len(at))
            sums.append(query.new_full(shape, -torch.inf, dtype=exact(query.dtype)))
            outs.append(query.new_zeros((*shape, value.shape[-1]), dtype=exact(query.dtype)))
        else:
            outs.append(part.out)
            sums.append(part.log_sum)
    return Softmax(torch.cat(outs, POSITIONS), torch.cat(sums, POSITIONS))


def _at(x: Tensor, where: range, dim: int = POSITIONS) -> Tensor:
    return x.narrow(dim, where.start, len(where))


def _places(spans: tuple[range, ...]) -> Iterator[tuple[range, range]]:
    """Where each piece of a rank is among the rank's positions, and in the row."""
    begin = 0
    for span in spans:
        yield range(begin, begin + len(span)), span
        begin += len(span)


def _allowed(mask: Tensor | RowMask, queries: range, keys: range) -> Tensor:
    return is_allowed(mask.at(queries, keys) if isinstance(mask, RowMask) else _at(_at(mask, queries), keys, -1))


def _known_of(mask: Tensor | RowMask, positions: Positions) -> dict[tuple[int, int], tuple[bool, bool]]:
    """Of each own piece and each piece of keys: whether some pair is allowed, and whether all are. Read once a mask."""
    if mask not in _seen_of_masks:
        size = len(positions.spans[0])
        blocks = [
            (queries, own.start, range(begin, begin + size))
            for queries, own in _places(positions.spans)
            for begin in range(0, positions.length, size)
        ]
        if active_fake_mode() is None:
            parts = (_allowed(mask, queries, keys) for queries, _, keys in blocks)
            found = torch.stack([torch.stack([part.any(), part.all()]) for part in parts]).tolist()
        else:  # a dry run: every pair may be
            found = [[True, False]] * len(blocks)
        _seen_of_masks[mask] = {
            (own, keys.start): (has_any, has_all)
            for (_, own, keys), (has_any, has_all) in zip(blocks, found, strict=True)
        }
    return _seen_of_masks[mask]  # type: ignore[no-any-return]


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([key.flatten(), value.flatten()])


def _unpacked(packed: Tensor, key: Tensor, value: Tensor) -> Pair:
    own, size = key.numel(), value.numel()
    return packed.narrow(0, 0, own).view(key.shape), packed.narrow(0, own, size).view(value.shape)


def _add_arrived(leaving: PendingHop, of_keys: Tensor, of_values: Tensor, key: Tensor, value: Tensor) -> None:
    for total, part in zip((of_keys, of_values), _unpacked(leaving.wait(), key, value), strict=True):
        total += part
