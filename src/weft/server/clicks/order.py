"""Which samples a unit takes: a function of (seed, unit) alone, whoever trains it.

samples [0, n - held) train, the last `held` = eval_fraction of n are held out
step t takes positions t * global_batch ... of an endless order: epoch after epoch, each a fresh permutation
share s of P takes the s-th of P nearly equal slices of its step, so the step's samples do not depend on P
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import DataError
from weft.data.order import permute


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    num_train: int
    global_batch: int
    shares: int
    seed: int

    def indices(self, unit: int) -> NDArray[np.int64]:
        """The samples of a unit."""
        step, share = divmod(unit, self.shares)
        start = step * self.global_batch
        first = start + share * self.global_batch // self.shares
        stop = start + (share + 1) * self.global_batch // self.shares
        epochs, places = np.divmod(np.arange(first, stop, dtype=np.int64), self.num_train)
        return permute(places, size=self.num_train, seed=self.seed, epoch=epochs)


def count_held_out(num_samples: int, *, eval_fraction: float) -> int:
    """At least one sample to train on and one to judge by."""
    if num_samples < 2:
        raise DataError(f"the click log has {num_samples} samples", hint="it needs two at least: one is held out")
    return min(num_samples - 1, max(1, round(num_samples * eval_fraction)))
