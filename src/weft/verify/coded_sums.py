"""Sums of gradients that travel as codes: every one of a step against the same rounding in one process.

All ranks give what they put into a sum and what they got out of it. The sum of the rounded gradients (rounded once more
where all ranks get it) must have the same bits: a scale of another block, a rounding at every hop, sums of codes or a
rank's own share that is not rounded all have others. The check also tells the error against the unrounded sum, and the
bound that follows from the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weft.comm.coded_sums import CodedSumRecord, watching_sums
from weft.verify.plain_codes import Rounding, rounded
from weft.verify.verdict import Check, Finding

NAME = "coded sums"


@dataclass(kw_only=True)
class SumEvidence:
    """What the sums of all ranks were, after `judge`."""

    num_sums: int = 0
    format: str = ""
    wrong: list[str] = field(default_factory=list)  # one line per sum with other bits
    error: float = 0.0  # of all sums against the unrounded ones, relative to their norm
    bound: float = 0.0

    def check(self) -> Check:
        if self.wrong:
            expected = f"the bits of {self.format} gradients summed in one process"
            return Check.failed(NAME, Finding(rule=6, step=1, expected=expected, found=self.wrong[0]))
        return Check.passed(
            NAME,
            f"{self.num_sums} sums in {self.format}, equal bits; error {self.error:.1e} of their norm, bound "
            f"{self.bound:.1e}",
        )


class SumWatch:
    """Keeps the sums of one step on this rank."""

    def __init__(self) -> None:
        self._records: list[CodedSumRecord] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with watching_sums(self._keep):
            yield

    def _keep(self, record: CodedSumRecord) -> None:
        given, received = record.given.cpu(), record.received.detach().cpu().clone()
        kept = CodedSumRecord(record.group, record.format, record.is_scattered, given, received)
        self._records.append(kept)

    def judge(self) -> SumEvidence:
        """Compare all sums with those of one process. Collective: every rank has a part of each sum."""
        found = SumEvidence()
        squares = torch.zeros(3, dtype=torch.float64)  # of errors, of bounds, of sums
        for index, record in enumerate(self._records):
            size = record.group.size()
            given: list[torch.Tensor] = [record.given] * size
            dist.all_gather_object(given, record.given, group=record.group)
            wrong, own = _compare(record, given)
            squares += own
            found.format = record.format
            if wrong:
                found.wrong.append(f"sum {index + 1} on rank {dist.get_rank()}: {wrong}")
        found.num_sums = len(self._records)
        return _over_ranks(found, squares)


def _compare(record: CodedSumRecord, given: Sequence[torch.Tensor]) -> tuple[str, torch.Tensor]:
    """(what differs, or "", squares of errors, bounds and sums)."""
    owners = [record.group.rank()] if record.is_scattered else range(len(given))
    parts = [_sum_of(given, owner, record.format, is_last=record.is_scattered) for owner in owners]
    expected, bound, exact = (torch.cat([part[at] for part in parts]) for at in range(3))
    received = record.received.reshape(-1)
    expected, bound, exact = (one[: received.numel()] for one in (expected, bound, exact))
    error = received.double() - exact
    squares = torch.stack([error.square().sum(), bound.double().square().sum(), exact.square().sum()])
    if not torch.equal(received, expected):
        at = int((received != expected).nonzero()[0])
        return f"element {at} is {received[at].item():.9g}, not {expected[at].item():.9g}", squares
    if bool((error.abs() > bound).any()):
        at = int((error.abs() > bound).nonzero()[0])
        return f"element {at} is off by {error[at].item():.3g}, more than {bound[at].item():.3g}", squares
    return "", squares


def _sum_of(
    given: Sequence[torch.Tensor], owner: int, name: str, *, is_last: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(as it must arrive, bound of its error, exact) of the share of one rank."""
    shares = [rounded(of_rank[owner], name) for of_rank in given]
    exact = torch.stack([of_rank[owner].double() for of_rank in given]).sum(0)
    summed = torch.stack([share.values.double() for share in shares]).sum(0).float()
    bound = torch.stack([share.bound for share in shares]).sum(0) + summed.abs() * 2.0**-23
    if is_last:
        return summed, bound, exact
    again: Rounding = rounded(summed, name)
    return again.values, bound + again.bound, exact


def _over_ranks(found: SumEvidence, squares: torch.Tensor) -> SumEvidence:
    held: list[tuple[SumEvidence, torch.Tensor]] = [(found, squares)] * dist.get_world_size()
    dist.all_gather_object(held, (found, squares))
    error, bound, size = torch.stack([one for _, one in held]).sum(0).tolist()
    found.wrong = [line for one, _ in held for line in one.wrong]
    found.format = next((one.format for one, _ in held if one.format), "")
    found.error, found.bound = (error / size) ** 0.5 if size else 0.0, (bound / size) ** 0.5 if size else 0.0
    return found
