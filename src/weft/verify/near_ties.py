"""What a mixture's numbers are where a token's experts are nearly tied.

Two correct runs have weights that differ by roundings, which Adam enlarges where a gradient is noise. Where two experts
have nearly equal scores, such a difference sends a token to another expert, with its gradient. One process shows it
only if its own roundings happen to move that token, so the truth's weights are moved at random:

    an evaluation    its loss may differ by as much as it moves
    a whole run      may be a run of one process that chooses otherwise, within the bounds of any model: a run is moved
                     by more and more until it does, so that its nearest ties show alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.verify.run_trace import RunTrace, Tensors
from weft.verify.tolerances import NOISE_SHARE

DRAWS = 8
FACTOR = 2.0  # a plan may move several tokens
SHARES = tuple(NOISE_SHARE / 4**power for power in (5, 4, 3, 2))  # a larger one shows by itself in losses and norms


@dataclass(frozen=True)
class Perturbation:
    """A movement of weights: which draw, and by which share of their update."""

    draw: int
    share: float = NOISE_SHARE


def evaluation_swing(
    evaluate: Callable[[Mapping[str, Tensor]], float], weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> float:
    """The largest change of an evaluation over draws of weights, each tensor moved by a share of its update."""
    right = evaluate(weights)
    changes = [abs(evaluate(perturbed(weights, initial, Perturbation(draw))) - right) for draw in range(DRAWS)]
    return FACTOR * max(changes)


def perturbed(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor], perturbation: Perturbation) -> Tensors:
    """Weights moved at random, each tensor by a share of its update, most where that is largest. What did not train
    does not move: experts that no token has chosen yet may have equal scores in every correct run (Ernie's routers
    start at zero)."""
    generator, found = torch.Generator().manual_seed(perturbation.draw), {}
    for name, value in weights.items():
        update = value.detach().cpu().double() - initial[name].cpu().double()
        noise = update * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        noise *= perturbation.share * update.norm() / (noise.norm() or 1.0)
        found[name] = value.detach() + noise.to(value)
    return found


def runs_that_choose_otherwise(
    truth: RunTrace, run: Callable[[Perturbation], RunTrace]
) -> Iterator[tuple[RunTrace, int]]:
    """Runs of one process with other choices than the truth, and the step of the first; the nearest ties first.

    `run` trains with forwards that read weights that are moved so."""
    left = list(range(DRAWS))
    for share in SHARES:
        for draw in tuple(left):
            other = run(Perturbation(draw, share))
            if (step := next((step for step, count in enumerate(flips(truth, other), 1) if count), None)) is not None:
                left.remove(draw)
                yield other, step


def flips(truth: RunTrace, other: RunTrace) -> list[int]:
    """Choices of experts that differ, by step."""
    return [
        sum(_count_flips(right, near[name]) for name, right in choices.items() if name in near)
        for choices, near in zip(truth.choices, other.choices, strict=True)
    ]


def _count_flips(right: Tensor, near: Tensor) -> int:
    return int((~(near.unsqueeze(2) == right.unsqueeze(1)).any(2)).sum())
