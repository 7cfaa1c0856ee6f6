"""How far an evaluation of a mixture may move because a token's experts are nearly tied.

Two correct runs have weights that differ by roundings, which Adam enlarges where a gradient is noise. Where two experts
have nearly equal scores, such a difference sends a token to another expert, and the loss of a small evaluation jumps.
One process shows it only if its own roundings happen to move that token, so the truth's weights are moved at random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weft.verify.tolerances import NOISE_SHARE

DRAWS = 8
FACTOR = 2.0  # a plan may move several tokens


def evaluation_swing(
    evaluate: Callable[[Mapping[str, Tensor]], float], weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> float:
    """The largest change of an evaluation over draws of weights, each tensor moved by a share of its update."""
    right, changes = evaluate(weights), []
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        moved = {}
        for name, value in weights.items():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            distance = NOISE_SHARE * (value.detach().cpu().double() - initial[name].cpu().double()).norm()
            moved[name] = value + (noise * (distance / (noise.norm() or 1.0))).to(value)
        changes.append(abs(evaluate(moved) - right))
    return FACTOR * max(changes)
