"""Attention dropout of context-parallel ranks on a real GPU: the masks that fused kernels draw for whole rows."""

from __future__ import annotations

import pytest
import torch
from context_ranks import ROWS, Attention, Rank
from gpu_engines import CUDA

pytestmark = pytest.mark.gpu

WIDTH, BOUND = 64, 2e-2  # a mask of another position moves outputs by tenths


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [256, 250])
def test_fused_kernels_drop_by_global_head_query_and_key(length: int, dtype: torch.dtype, is_masked: bool) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    shape = (ROWS, 8, length, WIDTH)
    made = (torch.randn(shape, generator=generator, device=CUDA).to(dtype) for _ in range(3))
    allowed = torch.ones(length, length, dtype=torch.bool, device=CUDA).tril().triu(-100)
    query, key, value = made
    mask = allowed.expand(ROWS, 1, -1, -1) if is_masked else None
    attention = Attention(query=query, key=key, value=value, mask=mask)
    undropped = Attention(query=query, key=key, value=value, mask=mask, rate=0.0).of_one_process()
    assert (attention.of_one_process() - undropped).abs().max() > 0.1
    for rank in range(2):
        for tp_rank in range(2):
            place = Rank(length=length, cp=2, cp_rank=rank, split="zigzag", tp=2, tp_rank=tp_rank, layout="inside")
            for found, expected in (attention.gathered(place), attention.over_heads(place)):
                torch.testing.assert_close(found, expected, rtol=0.0, atol=BOUND)
