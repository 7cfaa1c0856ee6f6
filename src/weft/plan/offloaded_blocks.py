"""Chooses `activations.offload_blocks = "auto"`: as many blocks as the link hides behind the forward.

    blocks = (OVERLAP x link x forward of the blocks - inputs of recomputed blocks) / saved tensors of a block

The backward takes longer than the forward, so what leaves in time also returns in time.
"""

from __future__ import annotations

import numpy as np

from weft.core.open_choices import with_offloaded_blocks
from weft.core.plan import Plan
from weft.plan.memory.saved_activations import saved_blocks
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.time.compute import block_seconds
from weft.plan.time.transfers import OVERLAP
from weft.plan.view import view_at


def with_chosen_blocks(request: Request, plan: Plan) -> Plan:
    """The plan with the number of its offloaded blocks chosen for the request's devices; other plans unchanged."""
    return with_offloaded_blocks(plan, choose_blocks(request, plan)) if plan.activations.has_open_blocks else plan


def choose_blocks(request: Request, plan: Plan) -> int:
    """The most blocks whose saved tensors leave while the other blocks compute."""
    view = view_at(request, columns_of([with_offloaded_blocks(plan, 0)]), np.arange(1), place=0)
    blocks, busy = saved_blocks(view), block_seconds(view)
    carried = OVERLAP * request.cluster.host.bytes_per_s * (busy.forward - busy.head_forward) - blocks.away
    number = np.floor(np.maximum(carried, 0.0) / np.maximum(blocks.block.none, 1.0))
    return int(np.minimum(number, blocks.num_kept)[0])
