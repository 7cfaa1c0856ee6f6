"""Two neighbours of four ranks exchange heads, and keys and values travel between the pairs: the gradients of one
process, in float64, with the planned bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor, nn

from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch
from weft.core.plan import Plan
from weft.engine.cp.attention import ContextAttention
from weft.engine.cp.positions import Positions
from weft.engine.cp.slices import Attending
from weft.engine.mesh import build_topology
from weft.models.cp.softmax import softmax_attention

LENGTH, HEADS, KV_HEADS, WIDTH, BOUND = 32, 8, 2, 8, 1e-12
OWN, SIZE = 2 * LENGTH // 4 * WIDTH * 8, 4  # bytes of a head on a rank; ranks
GROUPS: tuple[str, ...] = ("ring", "gather")


class Attention(nn.Module):
    """As gpt-oss hands its sinks to attention: its own parameter."""

    def __init__(self, sinks: Tensor, *, kv_heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(sinks)
        self.num_key_value_groups = HEADS // kv_heads


def own_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Any:
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if mask is None else mask
    assert query.shape[1] == key.shape[1] * module.num_key_value_groups
    return softmax_attention(query, key, value, allowed, scale=WIDTH**-0.5, sinks=module.sinks), None


def masks() -> dict[str, Tensor]:
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    border = torch.arange(LENGTH) >= LENGTH // 4 + 1
    return {
        "causal": (k <= q)[None, None],
        "window": ((k <= q) & (q - k < 5))[None, None],
        "documents": ((k <= q) & (border[:, None] == border[None]))[None, None],
    }


def differences(rank: int, world: int, kv_heads: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attention in GROUPS:
        for split in ("zigzag", "contiguous"):
            tables = {"attention": attention, "split": split, "ulysses": 2}
            plan = Plan.from_tables({"mesh": {"cp": world}, "context_parallel": tables})
            topology = build_topology(plan, device_type="cpu")
            for name, mask in masks().items():
                case = f"{attention}, {split}, {name}"
                positions = Positions(length=LENGTH, degree=world, rank=rank, split=plan.context_parallel.split)
                found[case] = _case(plan, topology, positions, mask, kv_heads)
            topology.close()
    return found


def _case(plan: Plan, topology: Any, positions: Positions, mask: Tensor, kv_heads: int) -> tuple[float, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": HEADS, "key": kv_heads, "value": kv_heads}
    whole = [
        torch.randn(2, heads, LENGTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in shapes.values()
    ]
    module = Attention(torch.randn(HEADS, generator=generator, dtype=torch.float64), kv_heads=kv_heads)
    gradient = torch.randn(2, LENGTH, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    expected, _ = own_attention(module, whole[0], whole[1], whole[2], mask)
    right = torch.autograd.grad(expected, [*whole, module.sinks], gradient)

    own = [positions.take(each.detach(), 2).requires_grad_() for each in whole]
    attention = ContextAttention(
        plan.context_parallel,
        topology.context,
        own_attention,
        name="attention",
        is_fused=True,
        keeps_gathered=False,
        attending=Attending(),
    )
    phase = ["forward"]
    names = [each.group_name for each in topology.context]
    ledger = TrafficLedger(axes=dict.fromkeys(names, "cp"), phase=lambda: phase[0])
    with OperatorWatch(ledger):
        out, _ = attention(module, *own, positions.of_groups(2).take(mask, 2))
        phase[0] = "backward"
        mine = torch.autograd.grad(out, [*own, module.sinks], positions.take(gradient, 1))
    dist.all_reduce(sinks := mine[3].clone())
    wrong = [out - positions.take(expected, 1), sinks - right[3]]
    wrong += [one - positions.take(other, 2) for one, other in zip(mine[:3], right[:3], strict=True)]
    sent = {(row["collective"], row["phase"]): (row["bytes"], row["count"]) for row in ledger.rows()}
    return max(float(each.detach().abs().max()) for each in wrong), sent


@pytest.mark.parametrize("kv_heads", [KV_HEADS, pytest.param(1, marks=pytest.mark.extended)])
def test_pairs_have_the_gradients_of_one_process_and_the_planned_bytes(kv_heads: int) -> None:
    """One key-value head is repeated for the pair."""
    heads = 2 * max(kv_heads, 2)  # of keys and values, as they travel
    exchanged, travels = (2 * HEADS + heads) * OWN / 2, heads * OWN
    for found in run_ranks(differences, SIZE, kv_heads):
        for name, (wrong, sent) in found.items():
            assert wrong < BOUND, f"{name}: {wrong}"
            between: dict[tuple[str, str], tuple[float, int]] = {
                ("send", "forward"): (travels, 1),
                ("send", "backward"): (2 * travels, 2),
            }
            if name.startswith("gather"):
                between = {
                    ("all_gather", "forward"): (travels, 2),
                    ("all_gather", "backward"): (travels, 2),
                    ("reduce_scatter", "backward"): (travels, 2),
                }
            both = {("all_to_all", phase): (exchanged, 4) for phase in ("forward", "backward")}
            assert sent == {**both, **between}, name
