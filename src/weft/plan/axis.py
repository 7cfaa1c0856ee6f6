"""The contract of a mesh axis in the planner: legality rules and traffic. `axes.py` lists all axes.

The formulas of memory and time shard parameters and activations by the degrees in `Columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from weft.plan.columns import Bools, Columns, Floats, Ints
from weft.plan.request import Request
from weft.plan.view import View

SMALL_ELEMENTS = 8  # collectives of at most so many elements are not counted


@dataclass(frozen=True)
class Rule:
    """A legality rule. `broken` marks illegal plans; `sentence` is the reason, `nearest` describes a legal plan."""

    name: str
    sentence: str
    broken: Callable[[Request, Columns], Bools]
    nearest: Callable[[Request, Columns], str] | None = None


@dataclass(frozen=True)
class TrafficRow:
    """One kind of collective; one entry per plan."""

    axis: str
    collective: str
    phase: str
    bytes: Floats
    count: Floats
    least: Floats | None = None  # of collectives, where `count` is only the most: buckets close between two gradients


@dataclass(frozen=True, kw_only=True)
class PlanAxis:
    """One axis. The defaults are those of an axis that only replicates: no rules, no traffic."""

    name: str
    rules: tuple[Rule, ...] = ()
    traffic: Callable[[View], Iterable[TrafficRow]] = lambda view: ()


def head_counts(request: Request) -> list[int]:
    blocks = [block for block in request.shape.kinds if block.shards("attention")]
    return [block.attention.num_heads for block in blocks if block.attention is not None]


def common(counts: list[int]) -> int:
    return int(np.gcd.reduce(counts)) if counts else 1


def divisors(number: int) -> str:
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(found)


def sharding_ranks(columns: Columns) -> Ints:
    """Ranks that heads and widths are sharded over: all of tp, or a side of the grid."""
    return np.where(columns.is_grid, columns.tensor_side.astype(np.int64), columns.tp)
