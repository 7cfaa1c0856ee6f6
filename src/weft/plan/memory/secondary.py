"""The secondary shard between forward and backward: each of N ranks keeps 1/N of the weights that arrived.

A unit's part exists from its gather in the forward to the end of its gather in the backward. The root is gathered first
in the backward, then the blocks, one ahead.
"""

from __future__ import annotations

import numpy as np

from weft.plan.columns import Floats
from weft.plan.view import View


def secondary_bytes(view: View, *, left: Floats, num_blocks: Floats, has_root: bool = False) -> Floats:
    """Bytes kept on a rank while `left` of `num_blocks` blocks are still to be gathered in the backward."""
    share, size = view.share, view.columns.secondary_shard
    blocks = (share.total.padded - share.root.padded) * np.maximum(left, 0.0) / np.maximum(num_blocks, 1.0)
    full = view.gathered_bytes(root=share.root.padded * has_root, blocks=blocks)
    return np.where(size > 0, full / np.maximum(size, 1), 0.0)
