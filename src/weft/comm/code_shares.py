"""Shares of an all-reduce in codes: whole blocks, so that no share depends on where another parameter ends.

    message of all numbers    [scales of all blocks | codes]
    messages of the shares    [ranks, scales of its blocks | its codes | filled up to the longest]

Shares have equally many numbers but for a block. A block cut at the end of a share would have one scale on one layout
and two on another: copies of a parameter on two such layouts would get different sums.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from weft.comm.codes import Sizes
from weft.core.wire_bytes import BLOCK, CODED, SCALE_BYTES, num_blocks


@cache
def shares_of(sizes: Sizes, num_ranks: int) -> tuple[Sizes, ...]:
    """The parts of the parameters in the share of each rank."""
    ends = [_block_end(sizes, sum(sizes) * (rank + 1) // num_ranks) for rank in range(num_ranks)]
    starts, shares = [0, *ends], []
    for begin, end in zip(starts, ends, strict=False):
        at, own = 0, []
        for size in sizes:
            own.append(max(0, min(at + size, end) - max(at, begin)))
            at += size
        shares.append(tuple(one for one in own if one))
    return tuple(shares)


def spans_of(shares: tuple[Sizes, ...]) -> list[slice]:
    """The numbers of each share, among those of all."""
    ends = list(accumulate(map(sum, shares), initial=0))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _block_end(sizes: Sizes, target: int) -> int:
    """The end of a block next to `target`."""
    at = 0
    for size in sizes:
        if target < at + size:
            return at + min(size, (target - at + BLOCK // 2) // BLOCK * BLOCK)
        at += size
    return at


def divide(message: Tensor, shares: tuple[Sizes, ...], name: str) -> Tensor:
    """The messages of the shares of one long message."""
    heads, counts = _lengths(shares, name)
    rows = message.new_zeros((len(shares), max(map(sum, zip(heads, counts, strict=True)))))
    parts = zip(torch.split(message[: sum(heads)], heads), torch.split(message[sum(heads) :], counts), strict=True)
    for row, (scales, codes) in zip(rows, parts, strict=True):
        row[: len(scales)] = scales
        row[len(scales) : len(scales) + len(codes)] = codes
    return rows


def joined(rows: Tensor, shares: tuple[Sizes, ...], name: str) -> Tensor:
    """The long message of the messages of all shares."""
    parts = list(zip(rows, *_lengths(shares, name), strict=True))
    return torch.cat([row[:head] for row, head, _ in parts] + [row[head : head + n] for row, head, n in parts])


def _lengths(shares: tuple[Sizes, ...], name: str) -> tuple[list[int], list[int]]:
    """Elements of scales and of codes in the message of each share."""
    per_block = SCALE_BYTES if name in CODED else 0  # a code is one byte, the element of such a message
    return [per_block * num_blocks(one) for one in shares], [sum(one) for one in shares]
