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
    free = request.budget_bytes - estimate_memory(views_of(request, columns)).total
    for _ in range(2):  # the update holds chunks that came early beside those in flight: the peak may grow by more
        staged = chunks_within(view, np.maximum(free, 0.0))
        found = replace(columns, staging_bytes=np.where(is_open, staged, columns.staging_bytes).astype(np.int64))
        beyond = estimate_memory(views_of(request, found)).total - request.budget_bytes
        if not np.any(is_open & (beyond > 0)):
            return found
        free = np.where(beyond > 0, staged - beyond, free)
    return replace(found, staging_bytes=np.where(is_open & (beyond > 0), 0, found.staging_bytes))
