"""Traffic of pipelines: activations and gradients between stages, and the gradient of a tied table on two stages."""

from __future__ import annotations

import numpy as np

from weft.core import axes
from weft.plan.axis import TrafficRow
from weft.plan.memory.parameters import table_elements
from weft.plan.pp.stages import PLACES
from weft.plan.time.links import reduce_bytes
from weft.plan.view import View


def traffic(view: View) -> list[TrafficRow]:
    """Sends of activations, except from the last stage, and of gradients, except from the first."""
    columns, stage = view.columns, view.stage
    m = columns.microbatches * (columns.pp > 1)
    turns = columns.is_v_shaped & (PLACES[view.place] == "last")  # the legs of a V meet there, without a send
    stages = columns.virtual_stages - turns
    forward, backward = m * (stages - stage.holds_head), m * (stages - stage.holds_embedding)
    sends = [
        TrafficRow(axes.PP, "send", phase, np.asarray(view.stream_bytes * times), times.astype(np.float64))
        for phase, times in (("forward", forward), ("backward", backward))
    ]
    return [*sends, _shared_table(view)]


def _shared_table(view: View) -> TrafficRow:
    """All-reduce of the gradient of a tied table on two ranks."""
    columns, stage = view.columns, view.stage
    is_shared = (columns.pp > 1) & (stage.holds_embedding != stage.holds_head) & view.shape.tied_head
    held = table_elements(view.shape, columns)
    elements = np.where(columns.zero > 0, held.shard, held.unsharded)
    nbytes = reduce_bytes(elements * view.sizes.gradient, np.full(len(columns), 2.0)) * is_shared
    return TrafficRow(axes.PP, "all_reduce", "update", nbytes, is_shared.astype(np.float64))
