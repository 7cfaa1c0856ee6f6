"""Float8 by rows and blocks on a GPU: kernels against the reference's arithmetic, layers and experts, compiled too."""

from __future__ import annotations

import pytest
import torch

import weft.engine.kernels.float8_products as products
from weft.core.float8_section import RECIPES, Float8Recipe
from weft.engine.kernels.float8 import scaled_product
from weft.engine.kernels.float8_scaling import Scaling
from weft.verify.float8_check import _errors

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("sizes", [(512, 768), (256, 144)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_reference(recipe: Float8Recipe, sizes: tuple[int, int]) -> None:
    """Planted operands; 136 rows, so blocks along the rows are padded."""
    errors = dict(_errors("w", sizes, Scaling(recipe), None, device=CUDA))
    assert max(errors.values()) < 5e-3, errors


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_kernels_multiply_what_the_emulation_multiplies(recipe: Float8Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.has_kernel(recipe, CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    x, w, g = (
        torch.randn(size, device=CUDA, dtype=torch.bfloat16, generator=generator)
        for size in ((256, 640), (384, 640), (256, 384))
    )
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(products, "has_kernel", lambda *_, has=has_kernel: has)
        rows, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = scaled_product(rows, weight, Scaling(recipe))
        out.backward(g)
        found.append([out.detach(), rows.grad, weight.grad])
    for by_kernel, emulated in zip(*found, strict=True):
        assert by_kernel is not None
        assert emulated is not None
        assert (by_kernel.float() - emulated.float()).norm() < 4e-3 * emulated.float().norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_products_are_eager_ones(recipe: Float8Recipe) -> None:
    x = torch.randn(256, 512, device=CUDA, dtype=torch.bfloat16)
    w = torch.randn(384, 512, device=CUDA, dtype=torch.bfloat16)
    plain = scaled_product(x, w, Scaling(recipe))
    compiled = torch.compile(lambda x, w: scaled_product(x, w, Scaling(recipe)), dynamic=False)(x, w)
    assert (plain.float() - compiled.float()).norm() < 5e-3 * plain.float().norm()
