"""The fused kernels of ring attention on a real GPU: parts of a softmax are the plain ones', with gradients."""

from __future__ import annotations

import pytest
import torch
from gpu_engines import CUDA

import weft.engine.cp.blocks as blocks
from weft.engine.cp.blocks import Seen, Whole, attend, gradients

pytestmark = pytest.mark.gpu

SIZE, WIDTH, SCALE = 160, 64, 0.125
BOUND = {torch.bfloat16: 2e-2, torch.float32: 2e-3}  # roundings of 8 bits; of TF32 products


def seen_by_name(name: str) -> Seen:
    generator = torch.Generator(CUDA).manual_seed(1)
    mask = torch.rand(2, 1, SIZE, SIZE, generator=generator, device=CUDA) < 0.3
    mask[:, :, 5] = False  # a query without keys here
    return {"all": Seen(), "triangle": Seen(is_triangle=True), "mask": Seen(mask=mask)}[name]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", ["all", "triangle", "mask"])
def test_fused_parts_are_the_plain_ones(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, seen = torch.Generator(CUDA).manual_seed(0), seen_by_name(name)
    query, key, value = (
        torch.randn(2, heads, SIZE, WIDTH, generator=generator, device=CUDA, dtype=dtype) for heads in (8, 2, 2)
    )
    assert blocks._kernel_of(query, value, seen) != "plain"
    found = attend(query, key, value, seen, scale=SCALE)
    log_sum = torch.logaddexp(found.log_sum, torch.ones_like(found.log_sum))  # as if other keys were seen elsewhere
    whole = Whole(found.out.to(dtype), query, log_sum)
    fused = (*found, *gradients(query, key, value, seen, whole, scale=SCALE))
    monkeypatch.setattr(blocks, "_kernel_of", lambda *_: "plain")
    plain = (*attend(query, key, value, seen, scale=SCALE), *gradients(query, key, value, seen, whole, scale=SCALE))
    for one, other in zip(fused, plain, strict=True):
        assert torch.equal(one.isneginf(), other.isneginf())
        one, other = one.nan_to_num(neginf=0.0), other.nan_to_num(neginf=0.0)
        assert (one - other).norm() <= BOUND[dtype] * other.norm()
