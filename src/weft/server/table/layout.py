"""From a `TableSpec` to the layout of its records. A stored record is packed: it has no padding word."""

from __future__ import annotations

import numpy as np

from weft.core.table_spec import TableSpec
from weft.server.table.optimizers import OPTIMIZERS
from weft.server.table.record import INIT_KINDS, META_DTYPE, Layout


def state_width(spec: TableSpec) -> int:
    """Floats of optimizer state beside a row."""
    return OPTIMIZERS[spec.optimizer.kind].state_width(spec.dim)


def record_dtype(spec: TableSpec) -> np.dtype[np.void]:
    """A record as it is copied out and stored."""
    fields = [("values", np.float32, (spec.dim,)), ("state", np.float32, (state_width(spec),))]
    return np.dtype([*META_DTYPE.descr, *fields])


def build_layout(spec: TableSpec) -> Layout:
    start, accumulator = OPTIMIZERS[spec.optimizer.kind].first_state(spec.optimizer, spec.dim)
    return Layout(
        dim=spec.dim,
        state_width=state_width(spec),
        accumulator_start=start,
        accumulator=accumulator,
        init_kind=INIT_KINDS.index(spec.init.kind),
        init_scale=spec.init.scale,
        init_seed=spec.init.seed % (1 << 63),
    )


CANDIDATE = Layout(
    dim=0, state_width=0, accumulator_start=0, accumulator=0.0, init_kind=0, init_scale=0.0, init_seed=0
)  # a key that is not yet admitted: its counters alone
