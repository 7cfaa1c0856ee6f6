"""Gradients and weights that travel as codes: every collective of a step against the same rounding in one process.

All ranks give what they put into a sum and what they got out of it. The sum of the rounded gradients (rounded once more
where all ranks get it) must have the same bits: a scale of another block, a rounding at every hop, sums of codes or a
rank's own share that is not rounded all have others. The check also tells the error against the unrounded sum, and the
bound that follows from the format. With error feedback the second step is watched too: what a rank gave must be its
gradients and the errors of its sum before, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from weft.comm.coded_sums import CodedRecord, watching_sums
from weft.verify.plain_codes import Rounding, rounded
from weft.verify.verdict import Check, Finding

SUMS, GATHERS = "coded sums", "coded gathers"


@dataclass(kw_only=True)
class SumEvidence:
    """What the sums of all ranks were, after `judge`."""

    name: str
    num_sums: int = 0
    format: str = ""
    wrong: list[str] = field(default_factory=list)  # one line per sum with other bits
    error: float = 0.0  # of all sums against the unrounded ones, relative to their norm
    bound: float = 0.0

    def check(self) -> Check:
        if self.wrong:
            expected = f"the bits of {self.format} codes of one process"
            return Check.failed(self.name, Finding(rule=6, step=1, expected=expected, found=self.wrong[0]))
        return Check.passed(
            self.name,
            f"{self.num_sums} collectives in {self.format}, equal bits; error {self.error:.1e} of their norm, bound "
            f"{self.bound:.1e}",
        )


class SumWatch:
    """Keeps the sums of one step on this rank."""

    def __init__(self) -> None:
        self._records: list[CodedRecord] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with watching_sums(self._keep):
            yield

    def _keep(self, record: CodedRecord) -> None:
        given, received = record.given.cpu(), record.received.detach().cpu().clone()
        bare = record.without_errors.cpu() if record.without_errors is not None else None
        self._records.append(replace(record, given=given, received=received, without_errors=bare))

    def judge(self, name: str) -> SumEvidence:
        """Compare all sums, or gathers, with those of one process. Collective: every rank has a part of each."""
        found = SumEvidence(name=name)
        records = [one for one in self._records if (one.kind == "all_gather") == (name == GATHERS)]
        fed = _FedBack()
        squares = torch.zeros(3, dtype=torch.float64)  # of errors, of bounds, of sums
        for index, record in enumerate(records):
            size = record.group.size()
            given: list[torch.Tensor] = [record.given] * size
            dist.all_gather_object(given, record.given, group=record.group)
            wrong, own = _compare(record, given)
            wrong = wrong or fed.differs(record, given)
            squares += own
            found.format = record.format
            if wrong:
                found.wrong.append(f"collective {index + 1} on rank {dist.get_rank()}: {wrong}")
        found.num_sums = len(records)
        return _over_ranks(found, squares)


class _FedBack:
    """The errors of every place as they must be, from what the ranks gave."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], torch.Tensor] = {}

    def differs(self, record: CodedRecord, given: Sequence[torch.Tensor]) -> str:
        """What differs between these numbers and those before with the errors of the sum before; or ""."""
        if record.without_errors is None:
            return ""
        place = (record.kind, record.place)
        before = self._errors.get(place, torch.zeros_like(record.given))
        self._errors[place] = errors = record.given - _rounded(record.given, record).view_as(record.given)
        lost = errors.view(-1)
        if record.partial:  # a place on every node rounds the sums of its node
            own = record.group.rank() // record.near
            summed = _summed([_rounded(one, record) for one in given][own * record.near : (own + 1) * record.near])
            for span in record.partial:
                lost[span] += (summed - _rounded(summed, record))[span]
        if record.own is not None:  # the owner of a share rounds its sum once more
            summed = _summed(_sums_of_nodes(given, record))
            lost[record.own] += (summed - _rounded(summed, record))[record.own]
        expected = before + record.without_errors
        if torch.equal(expected, record.given):
            return ""
        at = int((expected != record.given).view(-1).nonzero()[0])
        found, right = record.given.view(-1)[at].item(), expected.view(-1)[at].item()
        what = f"its gradient and the errors before (place {place[1]})"
        return f"element {at} was sent as {found:.9g}, not {right:.9g}: {what}"


def _compare(record: CodedRecord, given: Sequence[torch.Tensor]) -> tuple[str, torch.Tensor]:
    """(what differs, or "", squares of errors, bounds and sums)."""
    expected, bound, exact = (torch.cat(parts) for parts in zip(*_parts_of(record, given), strict=True))
    received = record.received.reshape(-1).float()
    error = received.double() - exact
    squares = torch.stack([error.square().sum(), bound.double().square().sum(), exact.square().sum()])
    if not torch.equal(received, expected):
        at = int((received != expected).nonzero()[0])
        return f"element {at} is {received[at].item():.9g}, not {expected[at].item():.9g}", squares
    if bool((error.abs() > bound).any()):
        at = int((error.abs() > bound).nonzero()[0])
        return f"element {at} is off by {error[at].item():.3g}, more than {bound[at].item():.3g}", squares
    return "", squares


def _parts_of(record: CodedRecord, given: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """(as it must arrive, bound of its error, exact) of the parts of what this rank got."""
    if record.kind == "all_gather":
        return [_arrived(own, record) for own in given]
    summed, bound = _summed(_sums_of_nodes(given, record)), _bound(given, record)
    exact = torch.stack([one.double().view(-1) for one in given]).sum(0)
    if record.kind == "all_reduce":
        again = _rounding(summed, record)
        return [(again.values, bound + again.bound, exact)]
    own = [one.view(len(given), -1)[record.group.rank()] for one in (summed, bound, exact)]
    return [tuple(own)]


def _rounding(values: torch.Tensor, record: CodedRecord) -> Rounding:
    """Flat, with the blocks of every row."""
    flat = values.reshape(-1).float()
    return rounded(flat, record.format, record.sizes * (flat.numel() // max(1, sum(record.sizes))))


def _rounded(values: torch.Tensor, record: CodedRecord) -> torch.Tensor:
    return _rounding(values, record).values


def _summed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of rounded numbers, before it is rounded itself."""
    return torch.stack([one.double() for one in values]).sum(0).float()


def _sums_of_nodes(given: Sequence[torch.Tensor], record: CodedRecord) -> list[torch.Tensor]:
    """What the ranks send, or by node the rounded sums of each node."""
    once = [_rounded(one, record) for one in given]
    if record.near == 1:
        return once
    nodes = [once[at : at + record.near] for at in range(0, len(once), record.near)]
    return [_rounded(_summed(node), record) for node in nodes]


def _bound(given: Sequence[torch.Tensor], record: CodedRecord) -> torch.Tensor:
    """Of the error of every sum, before it is rounded itself."""
    first = [_rounding(one, record) for one in given]
    bound = torch.stack([one.bound for one in first]).sum(0)
    sums = [_summed([one.values for one in first])]
    if record.near > 1:
        nodes = [
            _summed([one.values for one in first[at : at + record.near]]) for at in range(0, len(first), record.near)
        ]
        again = [_rounding(one, record) for one in nodes]
        bound += torch.stack([one.bound for one in again]).sum(0)
        sums += [*nodes, _summed([one.values for one in again])]
    return bound + sum(one.abs() for one in sums) * 2.0**-23


def _arrived(own: torch.Tensor, record: CodedRecord) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of one rank, which arrive in their own dtype."""
    found, dtype = rounded(own.float(), record.format, record.sizes), record.received.dtype
    arrived = found.values.to(dtype).float()
    return arrived, found.bound + (arrived - found.values).abs(), own.double()


def _over_ranks(found: SumEvidence, squares: torch.Tensor) -> SumEvidence:
    held: list[tuple[SumEvidence, torch.Tensor]] = [(found, squares)] * dist.get_world_size()
    dist.all_gather_object(held, (found, squares))
    error, bound, size = torch.stack([one for _, one in held]).sum(0).tolist()
    found.wrong = [line for one, _ in held for line in one.wrong]
    found.format = next((one.format for one, _ in held if one.format), "")
    found.error, found.bound = (error / size) ** 0.5 if size else 0.0, (bound / size) ** 0.5 if size else 0.0
    return found
