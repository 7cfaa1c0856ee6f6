"""Bytes sent per rank and step, by (axis, collective, phase), for every plan.

`bytes` follow the ring factors of links.py; `count` is the number of collectives.
Per block and micro-batch:
    tensor 1-D     2 all-reduces forward and 2 backward, or all-gathers and reduce-scatters: see tp/traffic.py
    tensor grids   panels of activations and of weights: see tp_grid/traffic.py
    context        keys and values of all ranks, gathered or exchanged for heads (cp/traffic.py)
    expert         dispatch and combine, forward and backward
Per step and FSDP unit: all-gathers and reduce-scatters by ZeRO stage. Between stages: one activation per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.axes import AXES
from weft.plan.axis import TrafficRow
from weft.plan.columns import Floats
from weft.plan.view import View


@dataclass(frozen=True)
class Traffic:
    """All collectives of a step."""

    rows: tuple[TrafficRow, ...]

    def of(self, *axis_names: str, phase: str | None = None, collective: str | None = None) -> tuple[Floats, Floats]:
        """(bytes, count) summed over these axes and, if given, one phase and one collective."""
        chosen = [
            row
            for row in self.rows
            if row.axis in axis_names and phase in (None, row.phase) and collective in (None, row.collective)
        ]
        size = len(self.rows[0].bytes)
        zero = np.zeros(size)
        return (
            sum((row.bytes for row in chosen), start=zero),
            sum((row.count for row in chosen), start=zero),
        )


def estimate_traffic(view: View) -> Traffic:
    """Traffic per step of the rank of `view`."""
    by_key: dict[tuple[str, str, str], TrafficRow] = {}
    for row in (row for axis in AXES for row in axis.traffic(view)):
        key = (row.axis, row.collective, row.phase)
        if before := by_key.get(key):  # tp and its grids share an axis
            row = TrafficRow(*key, before.bytes + row.bytes, before.count + row.count)
        by_key[key] = row
    return Traffic(tuple(by_key.values()))
