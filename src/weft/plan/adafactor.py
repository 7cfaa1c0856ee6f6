"""Adafactor's collectives, for every plan: two all-reduces per step among the ranks that share parameters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core.muon import AXIS
from weft.plan.axis import SMALL_ELEMENTS, TrafficRow
from weft.plan.memory.states import factored, num_tensors
from weft.plan.time.links import reduce_bytes
from weft.plan.view import View


def traffic(view: View) -> Iterator[TrafficRow]:
    if view.request.workload.optimizer != "adafactor":
        return
    columns = view.columns
    num_ranks = (np.where(columns.zero > 0, columns.shards, 1) * columns.tp).astype(np.float64)
    tensors = num_tensors(view)
    elements = factored(view).means + 2 * tensors
    count = np.where(tensors > SMALL_ELEMENTS, 2.0, 1.0) * (num_ranks > 1)
    yield TrafficRow(AXIS, "all_reduce", "update", reduce_bytes(4 * elements, num_ranks) * (num_ranks > 1), count)
