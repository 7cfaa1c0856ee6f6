"""Memory of loading weights, saving and resuming.

loading    the rank's shard and the largest full tensor
saving     a copy of weights and optimizer states on the host, written in the background
resuming   weights, optimizer states, and gradients that initialise the states
"""

from __future__ import annotations

import numpy as np

from weft.core.plan import Plan
from weft.plan.memory.feedback import feedback_bytes
from weft.plan.memory.weights import weight_bytes
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.view import view_at


def moments_of(request: Request, plan: Plan) -> dict[str, int]:
    """Bytes on the first pipeline rank; host bytes are per node."""
    view = view_at(request, columns_of([plan]), np.arange(1), place=0)
    share, sizes = view.share, view.sizes
    held = float((share.total.shard if plan.data_parallel.zero else share.total.unsharded)[0])
    largest = max(float(request.shape.embedding_parameters), float(share.largest_block[0]))
    errors = float(feedback_bytes(view)[0])
    copied = held * (sizes.master + sizes.optimizer) + errors
    weights = 0.0 if plan.offload.parameters != "none" else float(weight_bytes(view)[0])
    states = sizes.optimizer if plan.offload.optimizer == "none" else 0.0  # offloaded states are read where they stay
    return {
        "loading_bytes": round(weights + largest * sizes.master + errors),
        "resuming_bytes": round(weights + held * (states + sizes.gradient) + errors),
        "saving_host_bytes_per_node": round(copied * request.cluster.devices_per_node),
    }
