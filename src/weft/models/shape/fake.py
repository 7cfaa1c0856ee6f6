"""Stand-ins that let a Hugging Face model run on meta and fake tensors, for profiles and dry runs.

Each names the failure without it. They replace private names of transformers, because no public API announces fake
tensors: tests/fake/dryrun fails if one of them moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def transformers_patches() -> list[Any]:
    """Patches to enter around a forward on fake tensors."""
    import transformers.masking_utils as masks

    moe = _optional("transformers.integrations.moe")
    return [
        # HF reads positions to find packed documents, fails, and builds a mask that prevents fused attention
        mock.patch.object(masks, "find_packed_sequence_indices", return_value=None),
        # torch's grouped matmul runs in any precision, but infers shapes for bfloat16 only
        *([mock.patch.object(moe, "_grouped_mm", _grouped(moe._grouped_mm))] if hasattr(moe, "_grouped_mm") else []),
    ]


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class _GroupedProduct(torch.autograd.Function):
    """Shapes, saved tensors and operations of a grouped matmul: tokens sorted by expert times [experts, in, out]."""

    @staticmethod
    def forward(context: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(tokens, weight)
        return tokens @ weight[0]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, weight = context.saved_tensors
        tokens.T @ gradient  # counted: every token is multiplied once, whatever its expert
        return gradient @ weight[0].T, torch.empty_like(weight)


def _grouped(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def grouped_mm(tokens: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if weight.dtype == torch.bfloat16:
            return multiply(tokens, weight, *rest, **options)
        product: torch.Tensor = _GroupedProduct.apply(tokens.to(weight.dtype), weight)  # type: ignore[no-untyped-call]
        return product

    return grouped_mm


class _FusedAttention(torch.autograd.Function):
    """Shapes and saved tensors of fused attention: in half precision the output has the query's order in memory."""

    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        if query.dtype != torch.float32 and query.is_contiguous():
            out = query.new_empty(batch, heads, length, value.shape[-1])
        else:
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        context.save_for_backward(query, key, value, out, sums, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = context.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Stand-in for `F.scaled_dot_product_attention`: a kernel without values, fused for every variant."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)  # kernels take numbers to add
    return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call,no-any-return]
