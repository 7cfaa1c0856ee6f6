"""Experts in float8: their products against the reference's, gradients included, and the table after the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import FAMILIES, build_engine, global_batch

from weft.core.float8_section import RECIPES, Float8Recipe
from weft.engine.kernels.float8_experts import apply_to_experts
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.verify.float8_reference import multiply_experts_in_float8
from weft.verify.plain_experts import plain_experts


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_multiply_as_the_reference_does(recipe: Float8Recipe) -> None:
    plain: Any = build_skeleton(build_config(FAMILIES["mixtral"], vocab_size=257)).to_empty(device="cpu").bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in plain.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    model = copy.deepcopy(plain)
    multiply_experts_in_float8(plain, recipe)
    assert all(apply_to_experts(model, describe(model), recipe, None).values())
    results = []
    for one in (plain, model):
        experts: Any = next(iter(plain_experts(one).values()))
        draw = torch.Generator().manual_seed(1)
        hidden = torch.randn(48, 32, generator=draw).bfloat16().requires_grad_()
        index = torch.randint(0, 3, (48, 2), generator=draw)  # the last expert has no rows
        weights = torch.rand(48, 2, generator=draw).requires_grad_()
        out = experts(hidden, index, weights)
        out.backward(torch.randn(48, 32, generator=draw).bfloat16())
        results.append([out, hidden.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
    for expected, found in zip(*results, strict=True):
        assert expected.abs().max() > 0
        assert (expected.float() - found.float()).norm() < 4e-3 * expected.float().norm()


def test_choices_are_counted_as_without_float8() -> None:
    engine = build_engine("mixtral", {"precision": {"preset": "bf16"}, "float8": {"experts": "all"}})
    pending = engine.step_nowait(global_batch(0))
    pending.resolve()
    assert pending.router is not None
    assert [int(load.sum()) for load in pending.router.choices().values()] == [16 * 16 * 2] * 2


def test_the_table_names_the_products_of_experts() -> None:
    for recipe, name in (("blockwise", "float8_e4m3"), ("nvfp4", "float4_e2m1")):
        float8 = {"linears": "all", "experts": "all", "recipe": recipe}
        engine = build_engine("mixtral", {"precision": {"preset": "bf16"}, "float8": float8})
        plain = build_engine("mixtral", {"precision": {"preset": "bf16"}})
        assert engine.step(global_batch(0)).loss == pytest.approx(plain.step(global_batch(0)).loss, rel=2e-2)
        table = {row.component: row for row in engine.dtypes()}
        assert table["experts"].found == table["products"].found == (name,)
        assert all(row.ok for row in engine.dtypes())
