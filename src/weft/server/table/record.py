"""The layout of a record, from a `TableSpec`, and the row optimizers as data. Their kernels are in updates.py.

    words of a record   key (2) | last_seen | count | values | state, padded to an even number of 4-byte words

The top bit of the count's word marks a live slot. The key of a free slot is the number of the next free slot. A stored
record has no padding. State of a row of d columns: sgd none; adagrad d (sums of squares); rowwise_adagrad 1 (sum of
the rows' mean squares); adam 2 d + 1 (m, v, steps of this row); ftrl 2 d (z, n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.table_spec import RowOptimizer, TableSpec

LAST_SEEN, COUNT, VALUES = 2, 3, 4
LIVE = np.uint32(1 << 31)
MAX_COUNT = np.uint32((1 << 31) - 1)
META_WORDS = 4
META_DTYPE = np.dtype([("key", np.int64), ("last_seen", np.uint32), ("count", np.uint32)])
INIT_KINDS: tuple[str, ...] = ("zeros", "uniform", "normal")
ADD, SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL = 0, 1, 2, 3, 4, 5  # kernels


class Layout(NamedTuple):
    """The layout of a record for kernels. All numbers, so that one compiled kernel serves every table."""

    dim: int
    state_width: int
    accumulator_start: int  # first column of the state that begins at `accumulator`; those before it begin at 0
    accumulator: float
    init_kind: int
    init_scale: float
    init_seed: int


class Update(NamedTuple):
    """The numbers of a push, in the order of the kernel's arguments."""

    kernel: int
    lr: float
    scale: float  # of the gradients
    clock: int
    visits: int  # added to the count of each row
    admit_after: int


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    kernel: int
    by_column: int  # floats of state for each column of the row
    by_row: int = 0  # and for the row, after those
    constants: tuple[str, ...] = ()  # fields of RowOptimizer, in the order in which the kernel reads them
    accumulator_column: int | None = None  # multiples of d after which the state begins at initial_accumulator

    def state_width(self, dim: int) -> int:
        return self.by_column * dim + self.by_row

    def constant_values(self, optimizer: RowOptimizer) -> NDArray[np.float64]:
        fields = optimizer.model_dump() | {"beta1": optimizer.betas[0], "beta2": optimizer.betas[1]}
        return np.array([fields[name] for name in self.constants], dtype=np.float64)


OPTIMIZERS: dict[str, UpdateRule] = {
    "sgd": UpdateRule(kernel=SGD, by_column=0),
    "adagrad": UpdateRule(kernel=ADAGRAD, by_column=1, constants=("epsilon",), accumulator_column=0),
    "rowwise_adagrad": UpdateRule(
        kernel=ROWWISE_ADAGRAD, by_column=0, by_row=1, constants=("epsilon",), accumulator_column=0
    ),
    "adam": UpdateRule(kernel=ADAM, by_column=2, by_row=1, constants=("beta1", "beta2", "epsilon")),
    "ftrl": UpdateRule(
        kernel=FTRL, by_column=2, constants=("beta", "l1", "l2", "initial_accumulator"), accumulator_column=1
    ),
}


def state_width(spec: TableSpec) -> int:
    """Rows of optimizer state beside a row."""
    return OPTIMIZERS[spec.optimizer.kind].state_width(spec.dim)


def record_dtype(spec: TableSpec) -> np.dtype[np.void]:
    """A record as it is copied out and stored."""
    fields = [("values", np.float32, (spec.dim,)), ("state", np.float32, (state_width(spec),))]
    return np.dtype([*META_DTYPE.descr, *fields])


def build_layout(spec: TableSpec) -> Layout:
    column = OPTIMIZERS[spec.optimizer.kind].accumulator_column
    return Layout(
        dim=spec.dim,
        state_width=state_width(spec),
        accumulator_start=state_width(spec) if column is None else column * spec.dim,
        accumulator=0.0 if column is None else spec.optimizer.initial_accumulator,
        init_kind=INIT_KINDS.index(spec.init.kind),
        init_scale=spec.init.scale,
        init_seed=spec.init.seed % (1 << 63),
    )


CANDIDATE = Layout(
    dim=0, state_width=0, accumulator_start=0, accumulator=0.0, init_kind=0, init_scale=0.0, init_seed=0
)  # a key that is not yet admitted: its counters alone
