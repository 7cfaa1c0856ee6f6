"""Errors of gradients that travel as codes (`data_parallel.error_feedback`): 4 bytes for each number that a rank sends.

DDP                       every gradient
ZeRO, HSDP                the full gradients of all units, as a rank sends them to the shards
HSDP, between replicas    a shard of them, besides
"""

from __future__ import annotations

import numpy as np

from weft.plan.columns import Floats
from weft.plan.view import View

ERROR_BYTES = 4  # float32


def feedback_bytes(view: View) -> Floats:
    """Bytes on a rank; zero without error feedback."""
    columns, trained = view.columns, view.trained
    rest = trained.total.padded - trained.experts.padded
    scattered = rest * (columns.shards > 1) + trained.experts.padded * (columns.edp > 1)
    sharded = scattered + trained.total.shard * (columns.dp_replicate > 1)
    replicated = trained.total.unsharded * (columns.dp_replicate * columns.cp > 1)
    sent = np.where(columns.zero > 0, sharded, replicated)
    return np.asarray(np.where(columns.error_feedback > 0, sent * ERROR_BYTES, 0.0), dtype=np.float64)
