"""Losses of routers, load of experts and bias of the choice: every layout has those of one process.

The process itself is checked against a plain loop, which writes the losses out and shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks
from router_engines import (
    BOUNDS,
    CAPACITY,
    FAMILIES,
    PLANS,
    RATE,
    SPECS,
    STEPS,
    build,
    check_same,
    error,
    over_ranks,
    plans_for,
    runs,
    trained,
)
from samples import by_default
from tiny import global_batch

from weft.core.run_spec import RouterSpec


def check_layouts(family: str, worlds: Sequence[int], changes: dict[str, Any]) -> list[list[float]]:
    """Compare every layout that can train so; returns the figures of the steps."""
    alone = run_ranks(runs, 1, family, changes, timeout_s=120.0)
    expected = over_ranks(alone, "alone")
    for world in worlds:
        per_rank = alone if world == 1 else run_ranks(runs, world, family, changes, timeout_s=240.0)
        for name in plans_for(world, changes):
            check_same(expected, over_ranks(per_rank, name), f"{family} under {name}", bound=BOUNDS[family])
    figures: list[list[float]] = expected["figures"]
    return figures


@pytest.mark.parametrize("family", by_default([], list(FAMILIES), extended=["deepseek_v3"]))
def test_every_layout_has_the_gradients_of_one_process(family: str) -> None:
    figures = check_layouts(family, list(PLANS), {})
    assert any(load > 1 for load, *_ in figures)
    assert not any(dropped for *_, dropped in figures)


@pytest.mark.parametrize("family", by_default([], list(FAMILIES)))
def test_every_layout_drops_the_same_choices(family: str) -> None:
    figures = check_layouts(family, list(PLANS), {"capacity_factor": CAPACITY})
    assert all(dropped > 0.05 for *_, dropped in figures)


# --- one process against a plain loop -------------------------------------------------------------------------------


def plain_gradients(family: str) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Gradients of each step by autograd on the losses as the documentation writes them."""
    spec = SPECS[family]
    with build(family, {}, RouterSpec()) as engine:
        model = engine.model
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    routers = [m for name, m in model.named_modules() if name.endswith((".router", ".gate")) and hasattr(m, "top_k")]
    shares: list[torch.Tensor | None] = [None] * len(routers)
    found, balances = [], []
    for step in range(STEPS):
        seen: list[Any] = []
        handles = [router.register_forward_hook(_keep_in(seen)) for router in routers]
        batch = global_batch(step)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        for handle in handles:
            handle.remove()
        weight = (batch["labels"] != -100).sum()
        loss = (
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
            / weight
        )
        values = []
        for place, (scores, _, index) in enumerate(seen):
            wide = scores.flatten(0, -2).double()
            num_experts = wide.shape[-1]
            p = wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True) if family == "deepseek_v3" else wide.softmax(-1)
            counts = torch.bincount(index.flatten(), minlength=num_experts).double()
            own, before = counts / counts.sum(), shares[place]
            f = torch.full_like(own, 1 / num_experts) if before is None else before
            loss = loss + spec.balance_loss * num_experts * (f * p.mean(0)).sum()
            loss = loss + spec.z_loss * wide.logsumexp(-1).square().mean()
            values.append(float(num_experts * (own * p.mean(0)).sum()))
            shares[place] = own
            if spec.bias_rate:
                routers[place].e_score_correction_bias.add_(spec.bias_rate * torch.sign(counts.mean() - counts))
        balances.append(sum(values) / len(values))
        optimizer.zero_grad()
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found, balances


def _keep_in(seen: list[Any]) -> Any:
    return lambda _module, _args, output: seen.append(output)


def compare_plain(rank: int, world: int, family: str) -> tuple[dict[str, float], list[float], list[float]]:
    with build(family, {}, SPECS[family]) as engine:
        mine = trained(engine)
    right, balances = plain_gradients(family)
    worst = {
        f"{name} of step {step}": error(mine["gradients"][step].get(name), value)
        for step in range(STEPS)
        for name, value in right[step].items()
    }
    return worst, [balance for balance, _ in mine["terms"]], balances


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_has_the_gradients_of_the_written_losses(family: str) -> None:
    worst, mine, right = run_ranks(compare_plain, 1, family)[0]
    assert {name: value for name, value in worst.items() if not value < BOUNDS[family]} == {}
    assert mine == pytest.approx(right, rel=1e-6)
