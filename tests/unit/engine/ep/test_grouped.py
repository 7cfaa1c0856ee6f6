"""Experts over sorted rows compute what the module's own forward computes; fails if transformers' names move."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from expert_families import FAMILIES
from thread_ranks import give_values
from torch import nn

from weft.core.run_spec import ModelSpec
from weft.engine.ep.grouped import grouped_forward, grouped_linear, has_grouped_products
from weft.models.build import build_config, build_skeleton
from weft.models.ep.finder import find_expert_layout


def experts_of(family: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_skeleton(build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128))
    given: Any = give_values(model).float()
    given.config._experts_implementation = "grouped_mm"
    found: nn.Module = given.get_submodule(find_expert_layout(given).layers[0].name)
    return found


def outcome(experts: Any, rows: torch.Tensor, numbers: torch.Tensor, *, is_sorted: bool) -> dict[str, np.ndarray]:
    rows = rows.clone().requires_grad_()
    experts.zero_grad()
    if is_sorted:
        out = grouped_forward(experts, rows, numbers, grouped_linear())
    else:
        out = experts(rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1))
    out.square().sum().backward()
    found = {"out": out, "rows": rows.grad, **{name: value.grad for name, value in experts.named_parameters()}}
    return {name: value.detach().numpy() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_own_forward(family: str) -> None:
    experts: Any = experts_of(family)
    assert has_grouped_products(experts)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(23, experts.config.hidden_size, generator=generator)
    numbers = torch.randint(1, experts.num_experts, (23,), generator=generator).sort().values  # expert 0 has no row
    found = outcome(experts, rows, numbers, is_sorted=True)
    wanted = outcome(experts, rows, numbers, is_sorted=False)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # transformers' sort is not stable: the rows of an expert are added in another order
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_other_kernels_keep_their_own_forward() -> None:
    experts: Any = experts_of("qwen3_moe")
    experts.config._experts_implementation = "eager"
    assert not has_grouped_products(experts)
    assert not has_grouped_products(nn.Linear(2, 2))
