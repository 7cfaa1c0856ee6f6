"""The GPU kernel of `quantise_shard`: one read, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.engine.kernels.float8_operands import E4M3

BLOCK, WARPS = 4096, 8
_FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def launch(shard: torch.Tensor, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    made = torch.empty_like(shard, dtype=E4M3)
    size = shard.numel()
    _quantise[(triton.cdiv(size, BLOCK),)](
        shard, scale, made, size, most=torch.finfo(E4M3).max, compute=_FORMATS[compute], block=BLOCK, num_warps=WARPS
    )
    return made


@triton.jit
def _quantise(shard, scale, made, size, most: tl.constexpr, compute: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    values = tl.load(shard + at, mask=inside).to(compute).to(tl.float32) * tl.load(scale)
    values = tl.minimum(tl.maximum(values, -most), most)
    tl.store(made + at, values.to(made.dtype.element_ty), mask=inside)
