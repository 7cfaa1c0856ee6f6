"""Error feedback on two ranks: what has arrived after many sums is what was given, but for the errors of one sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from weft.comm.coded_sums import CodedSum, scatter_sum

RANKS, COUNT = 2, 1501  # the last share of an all-reduce is filled up
STEPS = (4, 48)


def drawn(rank: int, step: int) -> torch.Tensor:
    """Gradients with a lasting part: its rounding has the same sign in every step."""
    lasting = torch.randn(COUNT, generator=torch.Generator().manual_seed(rank)) * torch.logspace(-3, 0, COUNT)
    return lasting + 1e-3 * torch.randn(COUNT, generator=torch.Generator().manual_seed(1000 * step + rank))


def summed(rank: int, world: int, feeds_back: bool) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    sums, count = CodedSum(group, name="int8"), -(-COUNT // world)
    errors = torch.zeros(world, count) if feeds_back else None
    if feeds_back:
        sums.feed_back([COUNT, 7], device=torch.device("cpu"))
    exact, arrived, shares = (torch.zeros(COUNT, dtype=torch.float64) for _ in range(3))
    found: dict[str, Any] = {}
    for step in range(max(STEPS)):
        values = drawn(rank, step)
        flat = torch.zeros(world, count)
        flat.view(-1)[:COUNT] = values
        exact += torch.stack([drawn(one, step).double() for one in range(world)]).sum(0)
        small = torch.full((7,), float(step))
        sums.sum(values, place=0)
        sums.sum(small, place=1)
        arrived += values
        own = scatter_sum(flat, group, "int8", errors)
        rows = torch.empty(world, count)
        dist.all_gather(list(rows.unbind()), own)
        shares += rows.view(-1)[:COUNT]
        if step + 1 in STEPS:
            found[f"all_reduce {step + 1}"] = float((arrived - exact).norm())
            found[f"reduce_scatter {step + 1}"] = float((shares - exact).norm())
    if feeds_back and errors is not None:
        held = torch.stack([sums.errors[0], errors.view(-1)[:COUNT]]).double()
        dist.all_reduce(held)
        for name, total, lost in zip(("all_reduce", "reduce_scatter"), (arrived, shares), held, strict=True):
            found[f"{name} told"] = float((total + lost - exact).norm())
    return found


def test_errors_do_not_add_up_over_steps() -> None:
    plain, fed = run_ranks(summed, RANKS, False)[0], run_ranks(summed, RANKS, True)[0]
    few, many = STEPS
    for name in ("all_reduce", "reduce_scatter"):
        assert plain[f"{name} {many}"] > 5 * plain[f"{name} {few}"], "without it errors add up"
        assert fed[f"{name} {many}"] < 1.5 * fed[f"{name} {few}"], "with it they stay those of one sum"
        assert fed[f"{name} {many}"] < 0.1 * plain[f"{name} {many}"]
        assert fed[f"{name} told"] < 1e-4 * plain[f"{name} {many}"], (
            "the errors that ranks hold are all that is missing"
        )
