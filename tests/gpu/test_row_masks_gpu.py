"""Masks in pieces on a GPU: numbers and gradients of the whole mask, and no tensor of own times whole positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.masking_utils as masks
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from weft.engine.cp.attention import _in_pieces
from weft.engine.cp.masks import WholeRows, mask_of
from weft.engine.cp.positions import Positions

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LENGTH, DEGREE, HEADS, WIDTH = 32_768, 8, 4, 64
OWN = LENGTH // DEGREE


def documents_of(mean: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    borders = torch.randperm(LENGTH, generator=generator)[: LENGTH // mean]
    found = torch.zeros(1, LENGTH, dtype=torch.int64)
    found[0, borders] = 1
    return found.cumsum(1).to(CUDA)


CASES: dict[str, tuple[Any, Tensor | None]] = {
    "window": (masks.sliding_window_causal_mask_function(1000), None),
    "documents": (masks.causal_mask_function, documents_of(700)) if torch.cuda.is_available() else (None, None),
}


def mask_for(case: str, *, in_pieces: bool) -> Any:
    function, documents = CASES[case]
    batch = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64, device=CUDA)}
    if documents is not None:
        batch["position_ids"] = torch.arange(LENGTH, device=CUDA)[None]
        function = masks.and_masks(function, masks.packed_sequence_mask_function(documents))
    positions = Positions(length=LENGTH, degree=DEGREE, rank=3, split="zigzag")
    rows = WholeRows.of(batch, positions, lambda _given: documents)
    ask = mask_of(masks.sdpa_mask, rows, queries=positions, is_fused=True, in_pieces=in_pieces)
    return ask(batch_size=1, mask_function=function, device=CUDA)


def attended(case: str, dtype: torch.dtype, *, in_pieces: bool) -> tuple[list[Tensor], int]:
    """Output and gradients, and the most bytes beyond them."""
    generator = torch.Generator(CUDA).manual_seed(0)
    query, key, value = (
        torch.randn(1, HEADS, length, WIDTH, device=CUDA, generator=generator).to(dtype).requires_grad_()
        for length in (OWN, LENGTH, LENGTH)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = mask_for(case, in_pieces=in_pieces)
    out = _in_pieces(sdpa_attention_forward, nn.Module(), query, (key, value), mask, {})[0]
    out.backward(torch.ones_like(out))
    most = torch.cuda.max_memory_allocated() - before
    return [out.detach(), *(each.grad for each in (query, key, value) if each.grad is not None)], most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_pieces_have_the_numbers_of_the_whole_mask(case: str, dtype: torch.dtype) -> None:
    found, few = attended(case, dtype, in_pieces=True)
    expected, many = attended(case, dtype, in_pieces=False)
    worst = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() < worst * other.double().norm()
    assert many > OWN * LENGTH
    tensors = 4 * sum(each.numel() * each.element_size() for each in found)
    assert few < OWN * LENGTH // 2 + tensors, (few, many, tensors)
