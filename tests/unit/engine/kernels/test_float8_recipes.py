"""Scales of rows and blocks: operands and products against the arithmetic of the reference, the kernels' layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny import build_engine, global_batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft.engine.kernels.float8_products as products
import weft.engine.kernels.float8_scaling as scaling
from weft.core.errors import PlanError
from weft.core.float8_section import RECIPES, WHOLE, Float8Recipe
from weft.core.plan import Plan
from weft.engine.kernels.float8 import Float8Linear
from weft.engine.kernels.float8_operands import Operand, Role, nearest_e2m1, quantise_operand
from weft.engine.kernels.float8_scaling import Scaling
from weft.verify.float8_check import _errors, _planted
from weft.verify.float8_reference import _recompute, rounded

SCALED = [recipe for recipe in RECIPES if recipe != "tensorwise"]
SIZES = [(136, 160), (16, 128), (3, 400)]  # no dimension a multiple of blocks; whole blocks; few rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_are_the_nearest_numbers_of_their_recipe(
    recipe: Float8Recipe, role: Role, size: tuple[int, int]
) -> None:
    values = _planted("x", *size)
    values[:, :130] *= torch.arange(len(values))[:, None] % 3 != 0  # whole blocks of zeros
    found = quantise_operand(values, recipe, role).restored()
    expected = rounded(values, recipe, is_weight=role == "weight", is_gradient=role == "gradient")
    torch.testing.assert_close(found[:, : size[1]], expected, rtol=1e-6, atol=0)
    assert not found[:, size[1] :].any()


def test_a_scale_belongs_to_what_shares_it() -> None:
    """A large number costs only the numbers with its scale."""
    values = torch.full((256, 256), 0.01).bfloat16()
    values[3, 5] = 3e4
    flushed = {
        (recipe, role): quantise_operand(values, recipe, role).restored() == 0  # type: ignore[arg-type]
        for recipe in RECIPES
        for role in ("activation", "weight")
    }
    sizes = {key: (int(zeros.any(1).sum()), int(zeros.any(0).sum())) for key, zeros in flushed.items()}
    assert sizes["tensorwise", "activation"] == (256, 256)
    assert sizes["rowwise", "activation"] == sizes["rowwise", "weight"] == (1, 255)
    assert sizes["blockwise", "activation"] == (1, 127)
    assert sizes["blockwise", "weight"] == (128, 128)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_all_three_products_follow_the_recipe(recipe: Float8Recipe, has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(160, 144, bias=has_bias, dtype=torch.bfloat16)
    plain = nn.Linear(160, 144, bias=has_bias, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    plain.register_forward_hook(lambda *given: _recompute(recipe, *given))
    layer.__class__ = Float8Linear
    layer.scaling = Scaling(recipe)
    results: list[list[Tensor | None]] = []
    for module in (plain, layer):
        rows = _planted("x", 72, 160).view(2, 36, 160).requires_grad_()
        out = module(rows)
        out.backward(_planted("g", 72, 144).view(2, 36, 144))
        results.append([out.detach(), rows.grad, module.weight.grad, module.bias.grad if has_bias else None])
    for expected, found in zip(*results, strict=True):
        if expected is not None and found is not None:
            error = (expected.float() - found.float()).norm() / expected.float().norm()
            assert found.dtype == torch.bfloat16
            assert error < 2e-3


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_smaller_scales_err_less_on_uneven_operands(recipe: Float8Recipe) -> None:
    """Planted rows and columns differ by orders of magnitude, which one scale per tensor does not reach."""
    errors = {}
    for name in ("tensorwise", recipe):
        values = _planted("x", 256, 512)
        made = quantise_operand(values, name, "activation").restored()  # type: ignore[arg-type]
        errors[name] = ((made - values.float()) / values.float()).abs().median()
    assert errors[recipe] < 0.7 * errors["tensorwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_check_of_products_sees_a_wrong_scale(recipe: Float8Recipe) -> None:
    right = dict(_errors("w", (160, 256), Scaling(recipe), None, device=torch.device("cpu")))
    other: Float8Recipe = "rowwise" if recipe in WHOLE else "tensorwise"
    assert max(right.values()) < 3e-3

    class Other(Scaling):
        def operand(self, factor: Any) -> Any:
            return quantise_operand(factor[0], other, factor[2])

    if recipe not in WHOLE:
        wrong = dict(_errors("w", (160, 256), Other(recipe), None, device=torch.device("cpu")))
        assert min(wrong.values()) > 1e-2


def _wrong_block(operand: Operand) -> Operand:
    return dataclasses.replace(operand, scale=operand.scale.roll(1, dims=1))


def _transposed(operand: Operand) -> Operand:
    return dataclasses.replace(operand, scale=operand.scale.t()) if operand.block[0] > 1 else operand


@pytest.mark.parametrize("bug", [_wrong_block, _transposed])
def test_the_check_of_products_sees_planted_bugs(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*given: Any) -> Operand:
        return bug(quantise_operand(*given))  # type: ignore[no-any-return]

    monkeypatch.setattr(scaling, "quantise_operand", planted)
    wrong = dict(_errors("w", (256, 256), Scaling("blockwise"), None, device=torch.device("cpu")))
    assert wrong["output"] > 1e-2
    assert wrong["gradient of the input"] > 1e-2


@pytest.mark.parametrize("recipe", SCALED)
def test_a_model_trains_near_bfloat16(recipe: str) -> None:
    plain = build_engine("llama", {"precision": {"preset": "bf16"}})
    engine = build_engine("llama", {"precision": {"preset": "bf16"}, "float8": {"linears": "all", "recipe": recipe}})
    for step in range(3):
        found = engine.step(global_batch(step)).loss
        assert found == pytest.approx(plain.step(global_batch(step)).loss, rel=1e-2)
    table = {row.component: row.found for row in engine.dtypes()}
    assert table["products"] == (engine.plan.policy().products,)
    assert all(row.ok for row in engine.dtypes())


def test_weights_travel_in_float8_with_one_scale_alone() -> None:
    assert Plan.from_tables({"float8": {"linears": "all", "recipe": "rowwise"}}).float8.gather == "weights"
    with pytest.raises(PlanError, match="sends one scale per weight"):
        Plan.from_tables({"float8": {"linears": "all", "recipe": "rowwise", "gather": "float8"}})


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("sizes", [(256, 512, 384), (256, 144, 400)])
def test_operands_have_the_layout_that_kernels_take(
    recipe: Float8Recipe, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own checks of shapes and strides, which need no device."""
    rows, outputs, inputs = sizes
    monkeypatch.setattr(products, "has_kernel", lambda *_: True)
    with FakeTensorMode():
        x, w, g = torch.empty(rows, inputs), torch.empty(outputs, inputs), torch.empty(rows, outputs)
        x.requires_grad_()
        w.requires_grad_()
        from weft.engine.kernels.float8 import scaled_product

        scaled_product(x, w, Scaling(recipe)).backward(g)
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert w.grad is not None
        assert w.grad.shape == w.shape


def test_mxfp8_is_that_of_torchao() -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    values = _planted("mx", 96, 256)
    values[0, :32], values[1, :32] = 448.0, 449.0  # a scale of 1, and the next one
    scale, codes = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    expected = codes.float().view(96, -1, 32) * scale.float().view(96, -1, 1)
    assert torch.equal(quantise_operand(values, "mxfp8", "activation").restored(), expected.flatten(1))


def test_nvfp4_is_that_of_torchao() -> None:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    values = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = values.abs().amax().float() / (6 * 448)
    scale, packed = nvfp4_quantize(values, 16, whole)
    codes = f4_unpacked_to_f32(unpack_uint4(packed)).view(96, -1, 16)
    expected = codes * (scale.float().view(96, -1, 1) * whole)
    torch.testing.assert_close(quantise_operand(values, "nvfp4", "weight").restored(), expected.flatten(1))


def test_halves_of_e2m1_go_to_even_bits() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(nearest_e2m1(torch.stack([halves, -halves])), torch.stack([expected, -expected]))
