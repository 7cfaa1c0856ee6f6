"""The GPU kernel of a scaled gradient: one read, one write. Torch's own, with a cast, has half the speed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


def scale_into(made: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor) -> None:
    """made = gradient * scale, both contiguous; multiplied in float32, rounded once."""
    size = gradient.numel()
    _scale[(triton.cdiv(size, BLOCK),)](gradient, scale, made, size, block=BLOCK, num_warps=WARPS)


@triton.jit
def _scale(gradient, scale, made, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    values = tl.load(gradient + at, mask=inside).to(tl.float32) * tl.load(scale).to(tl.float32)
    tl.store(made + at, values.to(made.dtype.element_ty), mask=inside)
