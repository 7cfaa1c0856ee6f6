"""Bytes sent, counted where collectives are issued, for every caller: by axis, collective and phase.

| collective        | bytes sent per rank, of n                                          |
| ----------------- | ------------------------------------------------------------------ |
| all_gather        | full output x (n - 1) / n                                          |
| reduce_scatter    | full input x (n - 1) / n                                           |
| all_reduce        | 2 x tensor x (n - 1) / n                                           |
| broadcast, reduce | the tensor: every rank passes it on, in a ring or a pipelined tree |
| scatter           | the root: its full input x (n - 1) / n; others nothing             |
| gather            | the tensor; the root nothing                                       |
| all_to_all        | the input without the rank's own part                              |
| send              | the tensor; a receiver sends nothing and has no row                |

An all-reduce by an algorithm of ours has that algorithm's bytes (`algorithms/registry.py`): the busiest rank's.

A listener of `OperatorWatch` sees c10d's operators, also those of `fully_shard` and DDP, on fake and real tensors
alike. Seconds are those between issue and completion, overlapped or not, if the backend reports completion: Gloo does
for all but reduce_scatter, NCCL only with its timing enabled, which is the user's choice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.algorithms.registry import ALGORITHMS
from weft.comm.observer import (
    BUFFERS,
    SMALL_ELEMENTS,
    carries_buffers,
    collective_name,
    group_of,
    named_group,
    tensors_of,
)

Key = tuple[str, str, str]  # axis, collective, phase (BUFFERS: inside `buffer_collectives`)


class TrafficLedger:
    """`axes` maps group names to axes; `phase` is called at every collective. Small tensors do not count."""

    def __init__(self, *, axes: Mapping[str, str], phase: Callable[[], str]) -> None:
        self._axes, self._phase = axes, phase
        self.counts: Counter[Key] = Counter()
        self._sent: dict[Key, Fraction] = {}  # rounded once, not per collective
        self._seconds: dict[tuple[str, str], float] = {}

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = collective_name(func)
        if name is not None and name != "recv":
            self._record(name, func, args, result)

    def clear(self) -> None:
        for kept in (self.counts, self._sent, self._seconds):
            kept.clear()

    def rows(self) -> list[dict[str, str | int]]:
        """Rows in the format of the JSON of plans and dry runs."""
        return [
            {
                "axis": axis,
                "collective": name,
                "phase": phase,
                "bytes": round(self._sent[key]),
                "count": self.counts[key],
            }
            for key in sorted(self.counts)
            for axis, name, phase in [key]
        ]

    def seconds(self) -> dict[tuple[str, str], float]:
        """By (axis, collective); collectives whose backend reports no completion are missing."""
        return dict(self._seconds)

    def _record(self, name: str, func: Any, args: Any, result: Any) -> None:
        found = tensors_of(args)
        largest = max(found, key=lambda tensor: tensor.numel(), default=None)
        if largest is None or largest.numel() <= SMALL_ELEMENTS:
            return
        given = _named(func, args)
        group = named_group(given["group"]) if "algorithm" in given else group_of(args)
        size = group.size() if group is not None else 1
        axis = self._axes.get(group.group_name, "world") if group is not None else "world"
        key = (axis, name, BUFFERS if carries_buffers() else self._phase())
        self.counts[key] += 1
        rank = group.rank() if group is not None else 0
        self._sent[key] = self._sent.get(key, Fraction(0)) + _sent_bytes(name, given, args, size=size, rank=rank)
        if group is not None and dist.get_backend(group) == "gloo":
            self._time(axis, name, result)

    def _time(self, axis: str, name: str, result: Any) -> None:
        began_s = time.perf_counter()

        def done(_: Any) -> None:
            self._seconds[axis, name] = self._seconds.get((axis, name), 0.0) + time.perf_counter() - began_s

        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.ScriptObject):
                try:
                    dist.Work.unbox(value).get_future().add_done_callback(done)
                except RuntimeError:
                    return  # this kind of work has no future: its time is unknown


def _sent_bytes(name: str, given: Mapping[str, Any], args: Any, *, size: int, rank: int) -> Fraction:
    """By the table above. c10d's own operators take lists of tensors; an all-gather's list has one per rank."""
    others = Fraction(size - 1, size)
    if "algorithm" in given:
        return _nbytes(given["values"]) * ALGORITHMS[name][given["algorithm"]].sent(size, 1)
    if name == "all_to_all":
        return _exchanged(given, size=size, rank=rank)
    if name in ("scatter", "gather"):
        is_root = given["root_rank"] == rank
        if name == "scatter":
            return _nbytes(given["input_tensors"]) * others if is_root else Fraction(0)
        return Fraction(0) if is_root else Fraction(_nbytes(given["input_tensors"]))
    full = max(_nbytes(value) for value in args)  # the tensor, or the full side of a gather or a scatter of sums
    share = {"all_gather": others, "reduce_scatter": others, "all_reduce": 2 * others}
    return full * share.get(name, Fraction(size > 1 or name == "send"))


def _exchanged(given: Mapping[str, Any], *, size: int, rank: int) -> Fraction:
    """The input of an all-to-all without the rank's own part: a list of parts, or rows in given or even numbers."""
    sent = next(given[name] for name in ("input_tensors", "input") if name in given)
    total = _nbytes(sent)
    if isinstance(sent, list | tuple):
        return Fraction(total - _nbytes(sent[rank]))
    rows = given.get("input_split_sizes")
    own = Fraction(rows[rank], max(sum(rows), 1)) if rows else Fraction(1, size)
    return total * (1 - own)


def _named(func: Any, args: Any) -> dict[str, Any]:
    """The operator's arguments by the names of its schema."""
    schema = getattr(func, "_schema", None)
    return dict(zip((one.name for one in schema.arguments), args, strict=False)) if schema is not None else {}


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))
