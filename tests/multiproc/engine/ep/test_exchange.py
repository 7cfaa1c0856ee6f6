"""Rows that leave a rank, per dispatcher, and the collectives of a forward and a backward."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn

from weft.comm.observer import CollectiveObserver
from weft.engine.ep.dispatch import DISPATCHERS

EXPERTS, TOP_K, TOKENS, HIDDEN = 32, 8, 512, 8


class Doubled(nn.Module):
    """Experts that need no weights: what travels does not depend on them."""

    def forward(self, hidden: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


def measure(rank: int, world: int) -> dict[str, tuple[float, dict[str, int], float]]:
    """Per dispatcher: rows of hidden states that leave this rank in a forward, per token; collectives; the error."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    index = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=generator, requires_grad=True)
    group, found = dist.group.WORLD, {}
    assert group is not None
    for kind, dispatcher in DISPATCHERS.items():
        rows: list[int] = []
        hidden.requires_grad_().grad = None
        with mock.patch.object(dist, "all_to_all_single", _counted(rows, rank)), CollectiveObserver() as seen:
            out = dispatcher(EXPERTS, group)(Doubled(), hidden, index, weights)
            there = rows[0] / TOKENS if rows else float(world - 1)
            out.sum().backward()
        error = (out - 2 * hidden * weights.sum(1, keepdim=True)).abs().max()
        found[kind] = there, dict(seen.counts), float(error.detach())
    return found


def _counted(rows: list[int], rank: int) -> Any:
    own = dist.all_to_all_single

    def counted(output: Any, input: Any, *splits: Any, **options: Any) -> Any:
        if splits and input.shape[-1] == HIDDEN and input.is_floating_point():
            rows.append(sum(count for place, count in enumerate(splits[1]) if place != rank))
        return own(output, input, *splits, **options)

    return counted


def test_rows_that_travel_are_those_of_the_formulas() -> None:
    world = 4
    held = EXPERTS // world
    none_here = math.comb(EXPERTS - held, TOP_K) / math.comb(EXPERTS, TOP_K)
    expected = {"pairs": TOP_K * (1 - 1 / world), "tokens": (world - 1) * (1 - none_here), "gather": world - 1}
    counts = {
        "pairs": {"all_to_all": 1 + 2 + 2},  # numbers of rows, there and back, and both again
        "tokens": {"small_all_to_all": 1, "all_to_all": 3 + 3},  # routing beside the rows; of weights the gradient
        "gather": {"all_gather": 3 + 1, "reduce_scatter": 1 + 2},
    }
    for found in run_ranks(measure, world):
        for kind, (rows, seen, error) in found.items():
            assert abs(rows / expected[kind] - 1) < 0.05, (kind, rows)
            assert seen == counts[kind], (kind, seen)
            assert error < 1e-5, kind
