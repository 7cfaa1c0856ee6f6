"""Schedule-free AdamW from two checkpoints, element by element: y is the parameter, z and v are its states.

    z' = z - lr d,  d = g / (sqrt(v'/(1 - b2^t)) + eps) + wd y,  v' = b2 v + (1 - b2) g^2
    y' = (1 - c) y + c z - (1 - b1 (1 - c)) (z - z'),  c = lr^2 / (sum of lr^2): rates do not fall
    x  = (y - (1 - b1) z) / b1 is evaluated and exported

v shows the size of a gradient, and z its sign. Where g^2 is small beside v, rounding of v leaves g uncertain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from weft.verify.oracle.facts import Saved, Tables, Tensors
from weft.verify.tolerances import UNIT_ROUNDOFF

ROUNDOFF = UNIT_ROUNDOFF["float32"]
SQUARE_ROUNDINGS, UPDATE_ROUNDINGS, BASE_ROUNDINGS = 8.0, 256.0, 4.0


@dataclass(frozen=True, kw_only=True)
class FreeUpdate:
    """One parameter's update; before the first, z is y and v is zero."""

    y: torch.Tensor
    z: torch.Tensor
    new_z: torch.Tensor
    v: torch.Tensor
    new_v: torch.Tensor
    rate: float
    decay: float
    betas: tuple[float, float]
    epsilon: float
    count: int

    def gradient(self) -> torch.Tensor:
        """After clipping."""
        sign = (self.z - self.new_z - self.rate * self.decay * self.y).sign()
        return sign * self._square().clamp(min=0.0).sqrt()

    def _square(self) -> torch.Tensor:
        return (self.new_v - self.betas[1] * self.v) / (1.0 - self.betas[1])

    def _uncertainty(self) -> torch.Tensor:
        """Of the gradient."""
        off = SQUARE_ROUNDINGS * ROUNDOFF * self.new_v / (1.0 - self.betas[1])
        return off / torch.maximum(self._square().clamp(min=0.0).sqrt(), off.sqrt()).clamp(min=1e-300)

    def wrong_bases(self) -> torch.Tensor:
        """Where z' is not the step of z by this gradient."""
        denominator = (self.new_v / (1.0 - self.betas[1] ** self.count)).sqrt() + self.epsilon
        step = self.rate * (self.gradient() / denominator + self.decay * self.y)
        allowed = self.rate * self._uncertainty() / denominator + UPDATE_ROUNDINGS * ROUNDOFF * step.abs()
        return ~((self.new_z - self.z + step).abs() <= allowed + BASE_ROUNDINGS * ROUNDOFF * self.z.abs() + 1e-30)

    def change(self, *, weight_sum: float) -> torch.Tensor:
        """Of y, by the z that was saved."""
        share = self.rate**2 / weight_sum if weight_sum else math.nan
        return share * (self.z - self.y) - (1.0 - self.betas[0] * (1.0 - share)) * (self.z - self.new_z)


def evaluated(saved: Saved, train: Tables) -> Tensors:
    """The weights that are evaluated and exported: averages, for this optimizer."""
    if train["optimizer"] != "schedule_free":
        return saved.weights
    first, bases = float(train["betas"][0]), {name: f"{name}.z" for name in saved.weights}
    return {
        name: (weight - (1 - first) * saved.states[base]) / first if (base := bases[name]) in saved.states else weight
        for name, weight in saved.weights.items()
    }
