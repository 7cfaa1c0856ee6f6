"""Bugs in sums of codes: each trains without an error, close to the right curve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

import weft.comm.coded_sums
import weft.engine.dp.coded
from weft.comm.codes import Sizes, decode, encode
from weft.core.wire_bytes import CODED, SCALE_BYTES, num_blocks

Bug = AbstractContextManager[Any]


def scale_of_another_block() -> Bug:
    def wrong(messages: torch.Tensor, sizes: Sizes, name: str) -> torch.Tensor:
        if name not in CODED:
            return decode(messages, sizes, name)
        size = SCALE_BYTES * num_blocks(sizes)
        scales = messages[:, :size].clone().view(len(messages), -1, SCALE_BYTES).roll(1, dims=1)
        return decode(torch.cat([scales.flatten(1), messages[:, size:]], dim=1), sizes, name)

    return patch.object(weft.comm.coded_sums, "decode", wrong)


def own_share_not_rounded() -> Bug:
    begin, newest = weft.comm.coded_sums._Scatter.begin, {}

    def noting(values: torch.Tensor, name: str, sizes: Sizes = ()) -> torch.Tensor:
        newest["given"] = values.clone()
        return encode(values, name, sizes)

    def keeping(messages: torch.Tensor, shares: tuple[Sizes, ...], group: Any, name: str, nodes: Any = None) -> Any:
        one, given = begin(messages, shares, group, name, nodes), newest["given"]
        rank, finish = group.rank(), one.finish

        def without_own(errors: torch.Tensor | None = None) -> torch.Tensor:
            total: torch.Tensor = finish(errors)
            own = decode(one.received[rank : rank + 1], one.shares[0], one.name)[0]
            return total - own + given.view(-1)[one.spans[0]]

        object.__setattr__(one, "finish", without_own)
        return one

    patched = patch.object(weft.comm.coded_sums._Scatter, "begin", staticmethod(keeping))
    return both(patched, patch.object(weft.comm.coded_sums, "encode", noting))


@contextmanager
def both(one: Bug, other: Bug) -> Iterator[None]:
    with one, other:
        yield


def blocks_across_parameters() -> Bug:
    """A norm beside shards has other scales on every tensor-parallel rank."""

    def encoding(values: torch.Tensor, name: str, sizes: Sizes = ()) -> torch.Tensor:
        return encode(values, name)

    def decoding(messages: torch.Tensor, sizes: Sizes, name: str) -> torch.Tensor:
        return decode(messages, (sum(sizes),), name)

    return patch.multiple(weft.comm.coded_sums, encode=encoding, decode=decoding)


def parameters_forgotten() -> Bug:
    """The same where codes are asked for: collectives do not get the sizes."""
    scatter, gather = weft.engine.dp.coded.scatter_sum, weft.engine.dp.coded.gather_codes

    def scattering(shares: torch.Tensor, *args: Any, sizes: Sizes, **others: Any) -> torch.Tensor:
        return scatter(shares, *args, **others)

    def gathering(rows: torch.Tensor, own: torch.Tensor, group: Any, name: str, sizes: Sizes) -> None:
        gather(rows, own, group, name)

    return patch.multiple(weft.engine.dp.coded, scatter_sum=scattering, gather_codes=gathering)


def rounded_at_every_hop() -> Bug:
    def hops(self: Any, messages: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        total = torch.zeros(1, sum(sizes))
        for message in torch.split(messages, 1):
            one = total + decode(message, sizes, self.name)
            total = decode(encode(one, self.name, sizes), sizes, self.name)
        return total[0]

    return patch.object(weft.comm.coded_sums._Scatter, "_sum", hops)


def summed_in_codes() -> Bug:
    """Every rank's codes with the scales of the first."""

    def in_codes(self: Any, messages: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        if self.name not in CODED:
            return decode(messages, sizes, self.name).sum(0)
        size = SCALE_BYTES * num_blocks(sizes)
        scales = messages[:1, :size].expand(len(messages), -1)
        return decode(torch.cat([scales, messages[:, size:]], dim=1), sizes, self.name).sum(0)

    return patch.object(weft.comm.coded_sums._Scatter, "_sum", in_codes)


def own_nodes_sums_not_rounded() -> Bug:
    """Other nodes get codes of a node's sums; the node itself keeps them exact."""
    finish = weft.comm.coded_sums._Scatter.finish

    def exact(self: Any, errors: torch.Tensor | None = None) -> torch.Tensor:
        total: torch.Tensor = finish(self, errors)
        if self.nodes is None:
            return total
        at = self.nodes.between.rank()
        own, sizes = self._sum(self.received[:, at], self.shares[at]), self.shares[at]
        return total - decode(encode(own.unsqueeze(0), self.name, sizes), sizes, self.name)[0] + own

    return patch.object(weft.comm.coded_sums._Scatter, "finish", exact)


def errors_of_nodes_forgotten() -> Bug:
    """The second rounding of a sum by node is not made up for."""
    again = weft.comm.coded_sums._Scatter._again
    return patch.object(weft.comm.coded_sums._Scatter, "_again", lambda self, at, errors: again(self, at, None))


def errors_forgotten() -> Bug:
    def forgotten(given: torch.Tensor, sent: torch.Tensor, sizes: Sizes, name: str) -> None:
        given.zero_()

    return patch.object(weft.comm.coded_sums, "keep_errors", forgotten)


def errors_of_the_sum_forgotten() -> Bug:
    """An all-reduce rounds twice; only what a rank has sent itself is made up for."""
    finish = weft.comm.coded_sums.CodedSum.finish

    def once(self: Any) -> None:
        one = self._under_way
        kept = one.errors.clone() if one is not None and one.errors is not None else None
        finish(self)
        if kept is not None:
            one.errors.copy_(kept)

    return patch.object(weft.comm.coded_sums.CodedSum, "finish", once)


def sum_not_rounded_for_its_owner() -> Bug:
    """The owner keeps the sum as it is; all others get codes."""
    begin = weft.comm.coded_sums.CodedSum.finish

    def finish(self: Any) -> None:
        one = self._under_way
        begin(self)
        if one is not None:
            one.values.view(-1)[one.record.own] = one.scatter.finish()

    return patch.object(weft.comm.coded_sums.CodedSum, "finish", finish)
