"""Bugs in sums of codes: each trains without an error, close to the right curve."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

import weft.comm.coded_sums
from weft.comm.codes import decode, encode
from weft.core.wire_bytes import BLOCK, CODED, SCALE_BYTES

Bug = AbstractContextManager[Any]


def scale_of_another_block() -> Bug:
    def wrong(messages: torch.Tensor, count: int, name: str) -> torch.Tensor:
        if name not in CODED:
            return decode(messages, count, name)
        size = SCALE_BYTES * -(-count // BLOCK)
        scales = messages[:, :size].clone().view(len(messages), -1, SCALE_BYTES).roll(1, dims=1)
        return decode(torch.cat([scales.flatten(1), messages[:, size:]], dim=1), count, name)

    return patch.object(weft.comm.coded_sums, "decode", wrong)


def own_share_not_rounded() -> Bug:
    begin = weft.comm.coded_sums._Scatter.begin

    def keeping(shares: torch.Tensor, group: Any, name: str) -> Any:
        one = begin(shares, group, name)
        own, rank = shares[group.rank()], group.rank()
        finish = one.finish

        def without_own() -> torch.Tensor:
            total: torch.Tensor = finish()
            return total - decode(one.received[rank : rank + 1].clone(), one.count, one.name)[0] + own

        object.__setattr__(one, "finish", without_own)
        return one

    return patch.object(weft.comm.coded_sums._Scatter, "begin", staticmethod(keeping))


def rounded_at_every_hop() -> Bug:
    def finish(self: Any) -> torch.Tensor:
        self.work.wait()
        total = torch.zeros(1, self.count)
        for message in torch.split(self.received, 1):
            total = decode(encode(total + decode(message, self.count, self.name), self.name), self.count, self.name)
        return total[0]

    return patch.object(weft.comm.coded_sums._Scatter, "finish", finish)


def summed_in_codes() -> Bug:
    """Every rank's codes with the scales of the first."""

    def finish(self: Any) -> torch.Tensor:
        self.work.wait()
        if self.name not in CODED:
            return decode(self.received, self.count, self.name).sum(0)
        size = SCALE_BYTES * -(-self.count // BLOCK)
        scales = self.received[:1, :size].expand(len(self.received), -1)
        return decode(torch.cat([scales, self.received[:, size:]], dim=1), self.count, self.name).sum(0)

    return patch.object(weft.comm.coded_sums._Scatter, "finish", finish)


def errors_forgotten() -> Bug:
    def forgotten(self: Any, given: torch.Tensor) -> None:
        given.zero_()

    return patch.object(weft.comm.coded_sums._Scatter, "keep_errors", forgotten)


def errors_of_the_sum_forgotten() -> Bug:
    """An all-reduce rounds twice; only what a rank has sent itself is made up for."""
    finish = weft.comm.coded_sums.CodedSum.finish

    def once(self: Any) -> None:
        one = self._under_way
        finish(self)
        if one is not None and one.errors is not None:
            one.errors.copy_(one.given_before).sub_(decode_rows(one.scatter))

    begin = weft.comm.coded_sums.CodedSum.begin

    def beginning(self: Any, values: torch.Tensor, *, place: int = 0) -> Any:
        done = begin(self, values, place=place)
        if self._under_way.errors is not None:
            object.__setattr__(self._under_way, "given_before", self._under_way.errors.clone())
        return done

    return patch.multiple(weft.comm.coded_sums.CodedSum, begin=beginning, finish=once)


def decode_rows(scatter: Any) -> torch.Tensor:
    return decode(scatter.sent, scatter.count, scatter.name)


def sum_not_rounded_for_its_owner() -> Bug:
    """The owner keeps the sum as it is; all others get codes."""
    begin = weft.comm.coded_sums.CodedSum.finish

    def finish(self: Any) -> None:
        one = self._under_way
        begin(self)
        if one is not None:
            rank, count = self.group.rank(), one.scatter.count
            part = one.values.view(-1)[rank * count : (rank + 1) * count]
            part.copy_(one.scatter.finish()[: part.numel()])

    return patch.object(weft.comm.coded_sums.CodedSum, "finish", finish)
