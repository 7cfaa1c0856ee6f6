"""Proposes `offload.staging_bytes`: room that a plan leaves on its devices, in whole chunks, at most all states.

With several micro-batches activations of one of them leave little room and little time for copies of states. The peak
grows by at most the staging, so what is free there can be staged. Results do not depend on it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.plan.columns import Columns
from weft.plan.memory.peak import estimate_memory
from weft.plan.memory.staging import chunks_within
from weft.plan.request import Request
from weft.plan.time.state_stream import hides_copies
from weft.plan.view import view_at, views_of


def with_staging(request: Request, columns: Columns) -> Columns:
    """The plans, with room staged where copies of an update can hide behind several micro-batches."""
    view = view_at(request, columns, np.arange(len(columns)), place=0)
    is_open = hides_copies(view) & (columns.microbatches > 1) & (columns.staging_bytes == 0)
    if not np.any(is_open):
        return columns
    free = np.maximum(request.budget_bytes - estimate_memory(views_of(request, columns)).total, 0.0)
    staged = np.where(is_open, chunks_within(view, free), columns.staging_bytes)
    return replace(columns, staging_bytes=staged.astype(np.int64))
