"""Latency and bandwidth from measured times: seconds = steps x alpha_s + bytes x beta_s_per_byte.

Relative errors count, not absolute ones, so that small and large messages weigh alike; a measurement far off the line
(another job, a retransmission) loses its weight. Neither figure is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 30
_SCALE = 0.05  # relative errors beyond this count by their size, not by its square


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A measurement: `steps` messages that wait for one another, `nbytes` that pass one after the other."""

    steps: float
    nbytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, *, steps: float, nbytes: float) -> float:
        return steps * self.alpha_s + nbytes * self.beta_s_per_byte

    def as_dict(self) -> dict[str, float]:
        return {"alpha_s": self.alpha_s, "beta_s_per_byte": self.beta_s_per_byte}


def fit_link(timings: Sequence[Timing]) -> LinkFit | None:
    """The line through the timings; None if they cannot tell latency from bandwidth."""
    used = [one for one in timings if one.seconds > 0]
    rows = np.array([[one.steps / one.seconds, one.nbytes / one.seconds] for one in used])
    if len(used) < 2 or np.linalg.matrix_rank(rows / np.maximum(rows.max(axis=0), 1e-300)) < 2:
        return None
    weights = np.ones(len(used))
    found = np.zeros(2)
    for _ in range(_ROUNDS):
        found = _not_negative(rows, weights)
        errors = np.abs(rows @ found - 1)
        weights = np.minimum(1.0, _SCALE / np.maximum(errors, 1e-12))
    return LinkFit(alpha_s=float(found[0]), beta_s_per_byte=float(found[1]))


def _not_negative(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighted least squares of rows @ x = 1; of a negative figure it makes zero, and fits the other alone."""
    scale = np.maximum(rows.max(axis=0), 1e-300)  # the two columns differ by many decades
    root = np.sqrt(weights)
    scaled = rows / scale * root[:, None]
    found = np.linalg.lstsq(scaled, root, rcond=None)[0]
    for index in (0, 1):
        if found[index] < 0:
            other = scaled[:, 1 - index]
            found = np.zeros(2)
            found[1 - index] = (other @ root) / (other @ other)
    return np.asarray(found / scale)
