"""Same seed, same curve: every data-parallel layout against one process, on three families, with accumulation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

STEPS = 20
MICROBATCHES = (1, 4)
RECOMPUTED = {
    2: {"DDP x2": "full", "ZeRO-2 x2": "selective", "ZeRO-3 x2": "full"},
    4: {"HSDP 2x2": "selective"},
}


def plans_for(world: int, family: str) -> dict[str, dict[str, Any]]:
    if world == 1:
        layouts: dict[str, dict[str, Any]] = {"single": {}, "ZeRO-3 x1": {"data_parallel": {"zero": 3}}}
    else:
        layouts = {
            f"ZeRO-{zero} x{world}": {"mesh": {"dp_shard": world}, "data_parallel": {"zero": zero}}
            for zero in (1, 2, 3)
        }
    if world == 2:
        layouts["DDP x2"] = {"mesh": {"dp_replicate": 2}}
    if world == 4:
        layouts["HSDP 2x2"] = {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}
    found = {
        f"{name}, {count} micro-batches": {**tables, "pipeline": {"microbatches": count}}
        for name, tables in layouts.items()
        for count in MICROBATCHES
    }
    # of the families, GPT-2's: it has dropout, which must fall alike when it is drawn again
    for name, policy in RECOMPUTED.get(world, {}).items() if family == "gpt2" else ():
        plain = found[f"{name}, 4 micro-batches"]
        found[f"{name}, {policy} recompute"] = {**plain, "activations": {"policy": policy}}
    return found


def curves(rank: int, world: int, family: str) -> dict[str, list[tuple[float, float]]]:
    """The curve of every plan of this world size, one after the other in the same ranks."""
    found = {name: train_steps(build_engine(family, plan), STEPS) for name, plan in plans_for(world, family).items()}
    dist.barrier()
    return found


Curves = dict[str, list[tuple[float, float]]]


# up to a minute each: llama has six blocks, gpt2 draws its dropout row by row
CASES = by_default(
    [("qwen3-tied", 4)],
    [(family, world) for family in ("llama", "qwen3-tied", "gpt2") for world in (1, 2, 4)],
)


@functools.cache
def curves_alone(family: str) -> Curves:
    found: Curves = run_ranks(curves, 1, family)[0]
    return found


@pytest.mark.parametrize(("family", "world"), CASES)
def test_every_layout_has_the_curve_of_one_process(family: str, world: int) -> None:
    of_one = curves_alone(family)
    expected = of_one["single, 1 micro-batches"]
    per_rank = [of_one] if world == 1 else run_ranks(curves, world, family, timeout_s=240.0)
    assert all(found == per_rank[0] for found in per_rank), "ranks disagree about their own curve"
    for name, found in per_rank[0].items():
        loss_diff = max(abs(a[0] - b[0]) for a, b in zip(expected, found, strict=True))
        norm_diff = max(abs(a[1] - b[1]) / a[1] for a, b in zip(expected, found, strict=True))
        assert loss_diff <= SAME_CURVE_LOSS_ABS, f"{family} under {name}: losses differ by {loss_diff:.1e}"
        assert norm_diff <= SAME_CURVE_NORM_REL, f"{family} under {name}: norms differ by {norm_diff:.1e}"
    assert len({loss for loss, _ in expected}) == STEPS  # a curve, not a constant
