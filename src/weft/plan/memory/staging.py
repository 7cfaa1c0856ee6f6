"""Chunks of offloaded states that are on the device before and after their update, beside the slots of the update.

With L blocks, m micro-batches and S = `offload.staging_bytes` (engine/offload/ahead.py):

    while the last micro-batch is computed, d blocks of its backward done    S (1 - 1/m + d / (m L))
    after its backward                                                       S + activations that were freed

The first micro-batch is the same in reverse order, with chunks that leave. Chunks move whole, and only states that
exist. No more is loaded than the link carries before the update, which this bound leaves out.
"""

from __future__ import annotations

import numpy as np

from weft.plan.columns import Floats
from weft.plan.time.state_stream import chunk_bytes, held_elements, hides_copies
from weft.plan.view import View


def staged_in_step(view: View, *, done: Floats) -> Floats:
    """Bytes of chunks while the last micro-batch is computed, `done` blocks of its backward finished."""
    columns, blocks = view.columns, np.maximum(view.stage.blocks.sum(axis=1), 1)
    progress = 1 - (1 - np.minimum(done, blocks) / blocks) / columns.microbatches
    return chunks_within(view, columns.staging_bytes * progress)


def chunks_within(view: View, room_bytes: Floats) -> Floats:
    """Bytes of the whole chunks in `room_bytes`, at most all states of the rank."""
    held = held_elements(view)
    per_element = chunk_bytes(view)
    one_bytes = np.maximum(np.minimum(view.columns.chunk_elements, held) * per_element, 1.0)
    whole = np.floor(np.maximum(room_bytes, 0.0) / one_bytes) * one_bytes
    return np.where(hides_copies(view), np.minimum(whole, held * per_element), 0.0)
