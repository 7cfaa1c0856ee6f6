"""The dispatcher of every plan: `auto` is resolved by the rule of `core.experts`, as in the engine."""

from __future__ import annotations

import numpy as np

from weft.core.experts import choose_dispatcher
from weft.core.model_shape import ModelShape
from weft.plan.columns import DISPATCHERS, Ints


def chosen_dispatchers(shape: ModelShape, ep: Ints, given: Ints) -> Ints:
    """Indices into DISPATCHERS; `auto` stays where nothing is dispatched."""
    layers = shape.expert_layers
    if not layers:
        return given
    degrees, place = np.unique(ep, return_inverse=True)
    chosen = [_chosen(layers, int(degree)) for degree in degrees]
    return np.where(given == DISPATCHERS.index("auto"), np.asarray(chosen, dtype=np.int64)[place], given)


def _chosen(layers: tuple[tuple[int, int], ...], ep: int) -> int:
    is_dispatched = 1 < ep <= min(num_experts for num_experts, _ in layers)
    return DISPATCHERS.index(choose_dispatcher(layers, ep=ep) if is_dispatched else "auto")
