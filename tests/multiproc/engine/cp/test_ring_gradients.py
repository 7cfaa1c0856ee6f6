"""Ring attention on ranks has the gradients of one process, in float64; traffic is as planned; blocks that no pair
needs are not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

import weft.engine.cp.ring as ring_module
from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch
from weft.core.sequence_split import SequenceSplit
from weft.engine.cp.positions import Positions
from weft.engine.cp.ring import Ring, ring_attention
from weft.models.cp.softmax import softmax_attention

LENGTH, SCALE, BOUND = 32, 0.4, 1e-12
SHAPES = {"query": (2, 4, LENGTH, 8), "key": (2, 2, LENGTH, 8), "value": (2, 2, LENGTH, 12)}
KV_BYTES = 2 * 2 * LENGTH * (8 + 12) * 8
SPLITS: tuple[SequenceSplit, ...] = ("zigzag", "contiguous")


def masks() -> dict[str, torch.Tensor | None]:
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    borders = torch.stack([(torch.arange(LENGTH) >= LENGTH // 4).long(), (torch.arange(LENGTH) * 3 // LENGTH)])
    return {
        "causal": None,
        "full": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool),
        "window": ((k <= q) & (q - k < 5))[None, None],
        "documents": ((k <= q) & (borders[:, :, None] == borders[:, None, :]))[:, None],
    }


def gradients_of(rank: int, world: int) -> dict[str, Any]:
    """The worst difference of each case, blocks multiplied and bytes sent."""
    found: dict[str, Any] = {}
    for split in SPLITS:
        for name, mask in masks().items():
            for has_sinks in (False, True):
                found[f"{split}, {name}, sinks {has_sinks}"] = _case(rank, world, split, mask, has_sinks=has_sinks)
    dist.barrier()
    return found


def _case(
    rank: int, world: int, split: SequenceSplit, mask: torch.Tensor | None, *, has_sinks: bool
) -> tuple[float, int, list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, shape in SHAPES.items()
    }
    sinks = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_() if has_sinks else None
    gradient = torch.randn(2, LENGTH, 4, 12, generator=generator, dtype=torch.float64)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if mask is None else mask
    inputs = [*whole.values(), *([sinks] if sinks is not None else [])]
    expected = softmax_attention(*whole.values(), allowed, scale=SCALE, sinks=sinks)
    right = torch.autograd.grad(expected, inputs, gradient)

    positions = Positions(length=LENGTH, degree=world, rank=rank, split=split)
    own = [positions.take(each.detach(), 2).requires_grad_() for each in whole.values()]
    own_mask = None if mask is None else positions.take(mask, 2)
    group = dist.group.WORLD
    assert group is not None
    ring = Ring(positions=positions, group=group, scale=SCALE, mask=own_mask)
    ledger, phase = TrafficLedger(axes={group.group_name: "cp"}, phase=lambda: phase[0]), ["forward"]
    blocks = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        blocks[0] += 1
        return attend(*args, **kwargs)

    attend, ring_module.attend = ring_module.attend, counted
    try:
        with OperatorWatch(ledger):
            out = ring_attention(own[0], own[1], own[2], sinks, ring)
            phase[0] = "backward"
            mine = torch.autograd.grad(
                out, [*own, *([sinks] if sinks is not None else [])], positions.take(gradient, 1)
            )
    finally:
        ring_module.attend = attend
    wrong = [(out - positions.take(expected, 1)).abs().max()]
    wrong += [(one - positions.take(other, 2)).abs().max() for one, other in zip(mine[:3], right[:3], strict=True)]
    if sinks is not None:
        dist.all_reduce(total := mine[3].clone())
        wrong.append((total - right[3]).abs().max())
    return max(float(each.detach()) for each in wrong), blocks[0], ledger.rows()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process_and_bytes_those_planned(world: int) -> None:
    per_rank = run_ranks(gradients_of, world)
    hop = KV_BYTES // world
    for found in per_rank:
        for name, (wrong, _, rows) in found.items():
            assert wrong < BOUND, f"{name}: {wrong}"
            sent = {row["phase"]: (row["bytes"], row["count"]) for row in rows if row["collective"] == "send"}
            hops = world - 1
            assert sent == {"forward": (hops * hop, hops), "backward": (2 * hops * hop, 2 * hops)}, name
    for name, blocks in {"zigzag, causal": 2 * world + 1, "zigzag, full": 4 * world, "contiguous, full": world}.items():
        assert [found[f"{name}, sinks False"][1] for found in per_rank] == [blocks] * world
    assert [found["contiguous, causal, sinks False"][1] for found in per_rank] == list(range(1, world + 1))
    if world == 4:  # a window of 5 reaches the piece before
        assert [found["contiguous, window, sinks False"][1] for found in per_rank] == [1, 2, 2, 2]
