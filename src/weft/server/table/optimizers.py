"""Row optimizers as data: width of the state, constants, first state. Their update kernels are in updates.py.

State beside a row of d columns: sgd none; adagrad d (sums of squares); rowwise_adagrad 1 (sum of the rows' mean
squares); adam 2 d + 1 (m, v, steps of this row); ftrl 2 d (z, n).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.table_spec import RowOptimizer

ADD, SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL = 0, 1, 2, 3, 4, 5  # kernels


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    kernel: int
    by_column: int  # floats of state for each column of the row
    by_row: int = 0  # and for the row as a whole, after those
    constants: tuple[str, ...] = ()  # fields of RowOptimizer, in the order in which the kernel reads them
    accumulator_column: int | None = None  # multiples of d after which the state begins at initial_accumulator

    def state_width(self, dim: int) -> int:
        return self.by_column * dim + self.by_row

    def first_state(self, optimizer: RowOptimizer, dim: int) -> tuple[int, float]:
        """(column of the state from which it begins at an accumulator, that accumulator)."""
        if self.accumulator_column is None:
            return self.state_width(dim), 0.0
        return self.accumulator_column * dim, optimizer.initial_accumulator

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
