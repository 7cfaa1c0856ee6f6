"""Every dispatcher against one process in float64: the output and all gradients, for routings of every kind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor, nn

from weft.core.experts import WireFormat
from weft.engine.ep.apply import divide_experts
from weft.engine.ep.dispatch import DISPATCHERS
from weft.models.ep.finder import find_expert_layout
from weft.models.layout import describe
from weft.verify.float8_reference import round_inputs_of_experts

EXACT = 1e-12  # float64: only the order of sums differs
HIDDEN, WIDTH, TOP_K, TOKENS = 16, 24, 2, 12  # per rank


class ToyExperts(nn.Module):
    """Gated experts with biases, in either order of dimensions, and a norm that all share."""

    def __init__(self, num_experts: int, *, is_transposed: bool, has_bias: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = num_experts, is_transposed
        up, down = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
        if is_transposed:
            up, down = (up[1], up[0]), (down[1], down[0])
        self.gate_up_proj, self.down_proj = (nn.Parameter(_values(num_experts, *size)) for size in (up, down))
        self.gate_up_proj_bias = nn.Parameter(_values(num_experts, 2 * WIDTH)) if has_bias else None
        self.down_proj_bias = nn.Parameter(_values(num_experts, HIDDEN)) if has_bias else None
        self.post_expert_norm = nn.LayerNorm(HIDDEN).double()

    def forward(self, hidden: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in router_indices.unique().tolist():
            token, slot = (router_indices == expert).nonzero(as_tuple=True)
            gate, up = self._product("gate_up_proj", hidden[token], expert).chunk(2, dim=-1)
            made = self.post_expert_norm(self._product("down_proj", torch.tanh(gate) * up, expert))
            out = out.index_add(0, token, made * routing_weights[token, slot].unsqueeze(-1))
        return out

    def _product(self, name: str, x: Tensor, expert: int) -> Tensor:
        weight, bias = self.get_parameter(name)[expert], getattr(self, f"{name}_bias")
        made = x @ (weight if self.is_transposed else weight.T)
        return made if bias is None else made + bias[expert]


def _values(*shape: int) -> Tensor:
    return (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))) / shape[-1] ** 0.5
    )


class ToyModel(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.experts = ToyExperts(case.num_experts, is_transposed=case.is_transposed, has_bias=case.has_bias)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.experts(hidden, index, routing_weights=weights)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Case:
    num_experts: int = 8
    chosen: tuple[int, ...] = tuple(range(8))  # the experts that tokens choose from
    is_transposed: bool = False
    has_bias: bool = False


CASES = {
    "uneven counts": Case(),
    "experts without a token": Case(chosen=(0, 2, 3, 7)),
    "a rank without a token": Case(chosen=(0, 1)),
    "only the last rank": Case(chosen=(6, 7)),
    "7 experts": Case(num_experts=7, chosen=tuple(range(7))),
    "biases": Case(has_bias=True),
    "transposed": Case(is_transposed=True, has_bias=True),
}


def inputs(case: Case, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, index, weights, gradient of the output) of all ranks."""
    generator = torch.Generator().manual_seed(5)
    rows = world * TOKENS
    hidden, pull = (torch.randn(rows, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = torch.rand(rows, len(case.chosen), generator=generator) * torch.arange(1, len(case.chosen) + 1)
    index = torch.tensor(case.chosen)[scores.topk(TOP_K).indices]
    return hidden, index, torch.rand(rows, TOP_K, dtype=torch.float64, generator=generator), pull


def outcome(model: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, pull: Tensor) -> dict[str, Tensor]:
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = model(hidden, index, weights)
    (out * pull).sum().backward()
    found = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad
    return found  # type: ignore[return-value]


def compare(rank: int, world: int, names: tuple[str, ...]) -> dict[str, float]:
    worst = {}
    ways: tuple[tuple[WireFormat, int], ...] = (("activations", 1), ("activations", 2), ("float8", 5))
    for name, kind, (wire, chunks) in itertools.product(names, DISPATCHERS, ways):
        case = CASES[name]
        model = ToyModel(case)
        layout, experts = describe(model), find_expert_layout(model)
        given = inputs(case, world)
        whole = ToyModel(case)
        if wire == "float8":
            round_inputs_of_experts(whole)
        expected = outcome(whole, *given)
        group = dist.group.WORLD
        assert group is not None
        shards = divide_experts(model, layout, experts, group=group, kind=kind, wire=wire, chunks=chunks)  # type: ignore[arg-type]
        own = slice(rank * TOKENS, (rank + 1) * TOKENS)
        found = outcome(model, *(tensor[own] for tensor in given))
        for key, value in found.items():
            right = expected[key]
            if key in shards:
                (chunk,) = shards[key].chunks
                right = right[chunk.global_index]
            elif key in ("out", "hidden", "weights"):
                right = right[own]
            else:
                dist.all_reduce(value)  # used by all experts: every rank has a partial sum
            assert value.shape == right.shape, (name, kind, wire, chunks, key)
            worst[f"{name}, {kind}, {wire}, {chunks}, {key}"] = float(
                (value - right).abs().max() / expected[key].abs().max()
            )
    return worst


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.extended), 4])
def test_outputs_and_gradients_are_those_of_one_process(world: int) -> None:
    for worst in run_ranks(compare, world, tuple(CASES), timeout_s=120.0):
        assert len(worst) > 3 * 3 * 6 * len(CASES)
        assert {key: error for key, error in worst.items() if not error < EXACT} == {}


def starved(rank: int, world: int) -> dict[str, Any]:
    """Tokens go to the experts of rank 0 alone; and rank 1 has no token of its own."""
    case = Case(chosen=(0, 1))
    found = {}
    for kind in ("pairs", "tokens"):
        model = ToyModel(case)
        group = dist.group.WORLD
        assert group is not None
        divide_experts(model, describe(model), find_expert_layout(model), group=group, kind=kind)  # type: ignore[arg-type]
        hidden, index, weights, pull = (tensor[: TOKENS if rank == 0 else 0] for tensor in inputs(case, 1))
        made = outcome(model, hidden, index, weights, pull)
        found[kind] = float(made["experts.down_proj"].abs().sum()), len(made["out"])
    return found


def test_a_rank_without_tokens_has_zero_gradients() -> None:
    first, second = run_ranks(starved, 2)
    for kind in ("pairs", "tokens"):
        assert first[kind][0] > 0
        assert first[kind][1] == TOKENS
        assert second[kind] == (0.0, 0)
