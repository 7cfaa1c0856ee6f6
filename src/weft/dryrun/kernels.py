"""GPU kernels on CPU fake tensors: attention kernels and workspaces.

Fake tensors are on the CPU, so that neither a CUDA build nor a compiled guard is needed. Operators are then those of a
CPU; attention is replaced here, because its kernel decides whether the scores are written to memory.

| attention | used if                                                              | saves                             |
| --------- | -------------------------------------------------------------------- | --------------------------------- |
| cudnn     | half precision, on Hopper and Blackwell                              | q, k, v, output, a float per head |
| flash     | half precision, no mask, heads of one width up to 256, on other GPUs | the same                          |
| efficient | otherwise, with as many key-value heads as query heads               | the same                          |
| math      | otherwise                                                            | scores and probabilities too      |

A boolean mask becomes an additive one, which is saved. Kernels and workspaces were measured on an H200 with torch 2.11
(benchmarks/kernel_workspaces.py); flash's workspace follows its source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

aten = torch.ops.aten
Kernel = Literal["cudnn", "flash"]
HALF = (torch.float16, torch.bfloat16)
MAX_FUSED_HEAD = 256
# cuBLAS keeps a 32 MiB workspace for each of the two threads that multiply: forward and backward. Measured on Hopper.
LIBRARY_WORKSPACES_BYTES = (32 * 2**20, 32 * 2**20)
FEW_ROWS = 3072  # an embedding's backward sorts more rows than this
ROWS_PER_THREAD = 16  # at least, where several blocks sum rows
MAX_PARTIAL_SUMS_BYTES = 4 * 32 * 128 * 132 * 64  # 128 columns per block of 32 threads, 64 blocks on each of 132 SMs


def gpu_attention(kernel: Kernel) -> Callable[..., torch.Tensor]:
    """`scaled_dot_product_attention` of a GPU that prefers `kernel`."""
    return functools.partial(_attend, kernel)


def _attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    width = query.shape[-1]
    if query.dtype in HALF and max(width, value.shape[-1]) <= MAX_FUSED_HEAD:
        if kernel == "cudnn" and not (attn_mask is not None and attn_mask.requires_grad):
            bias = _as_numbers(attn_mask, query)
            return _first(
                aten._scaled_dot_product_cudnn_attention(
                    query, key, value, bias, _needs_grad(query, key, value), dropout_p, is_causal, scale=scale
                )
            )
        if attn_mask is None and width == value.shape[-1]:
            return _flash(query, key, value, dropout_p, is_causal, scale)
    if query.shape[-3] == key.shape[-3]:
        bias = _as_numbers(attn_mask, query)
        if bias is not None:
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return _first(
            aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, _needs_grad(query, key, value), dropout_p, is_causal, scale=scale
            )
        )
    return _first(
        aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Flash attention, with the head width padded to a multiple of eight."""
    width = query.shape[-1]
    scale = scale if scale is not None else width**-0.5  # before padding changes the width
    missing = -width % 8
    padded = [F.pad(tensor, (0, missing)) if missing else tensor for tensor in (query, key, value)]
    out = _first(aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale))
    return out[..., :width] if missing else out


def _as_numbers(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _first(results: Any) -> torch.Tensor:
    out: torch.Tensor = results[0]
    return out


# --- workspaces -------------------------------------------------------------------------------------------------------


def workspace_bytes(func: Any, args: Any) -> int:
    """Workspace of a GPU's kernel, allocated and freed within the call."""
    formula = _WORKSPACES.get(func)
    return formula(*args) if formula is not None else 0


def _cudnn_backward(_gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any) -> int:
    """The query's gradient in float32 and one float per row; with shared key heads, one gradient per query head."""
    sums = 4 * query.numel() + 4 * query.numel() // query.shape[-1]
    return sums + _repeated_gradients(query, key)


def _flash_backward(_gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any) -> int:
    """As cuDNN's, in tiles of 128 rows and 32 columns."""
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    return 4 * batch * heads * rows * (-(-width // 32) * 32 + 1) + _repeated_gradients(query, key)


def _repeated_gradients(query: torch.Tensor, key: torch.Tensor) -> int:
    if key.shape[1] == query.shape[1]:
        return 0
    batch, heads, _, width = query.shape
    return 2 * batch * heads * key.shape[2] * width * query.element_size()


def _efficient_backward(_gradient: torch.Tensor, query: torch.Tensor, *_: Any) -> int:
    return 4 * query.numel() + 8 * query.numel() // query.shape[-1]


def _embedding_backward(gradient: torch.Tensor, indices: torch.Tensor, *_: Any) -> int:
    """Partial sums in float32 of at most ten tokens each, assuming distinct tokens, and the sort's buffers."""
    tokens = indices.numel()
    if tokens <= FEW_ROWS:
        return 0
    return 4 * gradient.shape[-1] * (tokens + tokens // 10) + 48 * tokens


def _sum_over_rows(tensor: torch.Tensor, dims: Sequence[int] | None = None, *_: Any) -> int:
    """Gradients of biases and of norm weights: many blocks sum rows in parallel, each with its own partial sums."""
    reduced = sorted(dim % tensor.ndim for dim in dims or ())
    if not reduced or reduced != list(range(len(reduced))) or len(reduced) == tensor.ndim:
        return 0
    columns = math.prod(tensor.shape[len(reduced) :])
    rows = tensor.numel() // max(columns, 1)
    if columns % 4 or rows < 2 * ROWS_PER_THREAD:
        return 0  # one block per column, or too few rows for several blocks
    return min(MAX_PARTIAL_SUMS_BYTES, 4 * 32 * columns * (rows // ROWS_PER_THREAD))


_WORKSPACES: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.sum.dim_IntList: _sum_over_rows,
}
