"""The longest rows that devices train of a model, for each degree of context parallelism: `weft plan MODEL --longest`.

A length fits if some plan does with every block recomputed and any number of micro-batches. Lengths are doubled from
UNIT, then halved in between to a PARTS-th. A step has one row per device unless a global batch is given. The fastest of
all plans that fit the longest rows is then searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.plan.ask import Question
from weft.plan.estimate import Estimate
from weft.plan.objective import with_fixed
from weft.plan.request import Request
from weft.plan.search import has_fitting_plan, search
from weft.plan.space import Freedom

UNIT = 1024  # tokens: the shortest rows that are tried
MOST = 2**26
PARTS = 16
_CP = "mesh.cp"


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest rows of one degree of context parallelism; 0: not even UNIT tokens fit, or no layout is legal."""

    cp: int
    sequence_length: int
    global_batch: int
    best: Estimate | None  # the fastest plan for them

    def as_dict(self) -> dict[str, Any]:
        best = self.best.as_dict() if self.best else None
        return {
            "cp": self.cp,
            "sequence_length": self.sequence_length,
            "global_batch": self.global_batch,
            "best": best,
        }


def longest_rows(question: Question, fixed: Mapping[str, Any], *, global_batch: int | None = None) -> list[Longest]:
    """An answer per power of two of context-parallel ranks, or for the degree that `fixed` has."""
    request = question.request
    rows = global_batch or request.cluster.num_devices
    request = replace(request, workload=replace(request.workload, global_batch=rows))
    fixed = with_fixed(question.fixed, fixed)
    degrees = [int(fixed[_CP])] if _CP in fixed else list(_powers(request.cluster.num_devices))
    return [_longest(request, {**fixed, _CP: cp}, question.precision) for cp in degrees]


def _longest(request: Request, fixed: dict[str, Any], precision: dict[str, Any]) -> Longest:
    def fits(length: int) -> bool:
        return has_fitting_plan(_with_rows(request, length), fixed)

    below = 0
    for length in _doubled():
        if not fits(length):
            break
        below = length
    if 0 < below < MOST:
        step = max(UNIT, below // PARTS)
        low, high = below // step, 2 * below // step  # in steps: `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle)
        below = low * step
    best = None
    if below:
        found = search(_with_rows(request, below), freedom=Freedom(fixed=fixed), precision=precision, top=1)
        best = found.plans[0]
    rows = request.workload.global_batch
    return Longest(cp=int(fixed[_CP]), sequence_length=below, global_batch=rows, best=best)


def _with_rows(request: Request, length: int) -> Request:
    return replace(request, workload=replace(request.workload, sequence_length=length))


def _doubled() -> Iterator[int]:
    length = UNIT
    while length <= MOST:
        yield length
        length *= 2


def _powers(limit: int) -> Iterator[int]:
    degree = 1
    while degree <= limit:
        yield degree
        degree *= 2
