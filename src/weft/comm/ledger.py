"""Bytes sent, counted where collectives are issued, for every caller: by axis, collective and phase.

| collective     | bytes sent per rank, ring of n  |
| -------------- | ------------------------------- |
| all_gather     | full output x (n - 1) / n       |
| reduce_scatter | full input x (n - 1) / n        |
| all_reduce     | 2 x tensor x (n - 1) / n        |
| send           | the tensor; a receiver sends nothing and has no row |

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

from weft.comm.observer import BUFFERS, SMALL_ELEMENTS, carries_buffers, collective_name, group_of, tensors_of

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
            self._record(name, args, result)

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

    def _record(self, name: str, args: Any, result: Any) -> None:
        found = tensors_of(args)
        largest = max(found, key=lambda tensor: tensor.numel(), default=None)
        if largest is None or largest.numel() <= SMALL_ELEMENTS:
            return
        group = group_of(args)
        size = group.size() if group is not None else 1
        axis = self._axes.get(group.group_name, "world") if group is not None else "world"
        key = (axis, name, BUFFERS if carries_buffers() else self._phase())
        self.counts[key] += 1
        self._sent[key] = self._sent.get(key, Fraction(0)) + _sent_bytes(name, largest.nbytes, size)
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


def _sent_bytes(name: str, nbytes: int, size: int) -> Fraction:
    if name == "send":
        return Fraction(nbytes)
    return Fraction((2 if name == "all_reduce" else 1) * nbytes * (size - 1), size)
