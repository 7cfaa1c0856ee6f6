"""Attention of some queries to some keys, as one part of a softmax over more keys: outputs, and the log of the sum of
exponentials of each query's scores. The backward takes that of the whole softmax.

| kernel      | where                                                            | mask               |
| ----------- | ---------------------------------------------------------------- | ------------------ |
| `flash`     | CUDA, 16 bits, heads of one width that divides by 8, at most 256 | none, or causal    |
| `efficient` | CUDA, up to 32 bits, widths that divide by 8                     | any                |
| `cpu`       | CPU, heads of one width                                          | any                |
| `plain`     | elsewhere; the scores of the block exist                         | any                |

They are torch's own kernels, in the form that autograd calls: the public form keeps the sums to itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.cp.exchange import HEADS, POSITIONS

_HALF = (torch.float16, torch.bfloat16)
_MOST_WIDTH, _WIDTH_UNIT = 256, 8  # of heads, in flash attention
_BIAS_UNIT, _SUM_UNIT = 16, 32  # alignments of the efficient kernel's bias and sums
_aten = torch.ops.aten

Three = tuple[Tensor, Tensor, Tensor]


class Seen(NamedTuple):
    """Which keys of a block its queries see: all, the triangle of a square block, or those that `mask` allows."""

    is_triangle: bool = False
    mask: Tensor | None = None  # boolean, [rows or 1, heads or 1, queries, keys]


class Softmax(NamedTuple):
    """In float32 or more. `out`: [rows, heads, queries, width]; `log_sum`: -inf of a query without keys."""

    out: Tensor
    log_sum: Tensor


class Whole(NamedTuple):
    """Of the whole softmax, for these queries: its output, the gradient of it, and the log of its sum."""

    out: Tensor
    gradient: Tensor
    log_sum: Tensor


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def is_on_gpu(x: Tensor) -> bool:
    """True also in the dry run of a GPU."""
    return x.is_cuda


def has_flash(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    fits = width == value.shape[-1] <= _MOST_WIDTH and width % _WIDTH_UNIT == 0
    return is_on_gpu(query) and query.dtype in _HALF and fits


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen, *, scale: float) -> Softmax:
    times = query.shape[HEADS] // key.shape[HEADS]
    key, value = _for_queries(key, times), _for_queries(value, times)
    kernel = _kernel_of(query, value, seen)
    if kernel == "plain":
        return _attend_plainly(query, key, value, seen, scale)
    if kernel == "flash":
        out, log_sum = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, seen.is_triangle, False, scale=scale
        )[:2]
    elif kernel == "efficient":
        bias = _bias(seen.mask, query, key, unit=_BIAS_UNIT)
        out, log_sum = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, seen.is_triangle, scale=scale
        )[:2]
        log_sum = log_sum.narrow(-1, 0, query.shape[POSITIONS])
    else:
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, seen.is_triangle, attn_mask=_bias(seen.mask, query, key), scale=scale
        )
    if seen.mask is not None:  # kernels differ about a query without keys
        has_keys = seen.mask.any(-1)
        log_sum = log_sum.masked_fill(~has_keys, -torch.inf)
        out = out.masked_fill(~has_keys.unsqueeze(-1), 0.0)
    return Softmax(out.to(exact(query.dtype)), log_sum.to(exact(query.dtype)))


def gradients(query: Tensor, key: Tensor, value: Tensor, seen: Seen, whole: Whole, *, scale: float) -> Three:
    """Of queries, keys and values, in float32 or more."""
    times = query.shape[HEADS] // key.shape[HEADS]
    key, value = _for_queries(key, times), _for_queries(value, times)
    kernel = _kernel_of(query, value, seen)
    log_sum = whole.log_sum.masked_fill(whole.log_sum == -torch.inf, torch.inf)  # no keys at all: weights of 0
    out, gradient = whole.out.contiguous(), whole.gradient.contiguous()
    found: Any
    if kernel == "plain":
        found = _plain_gradients(query, key, value, seen, Whole(out, gradient, log_sum), scale)
    elif kernel == "flash":
        lengths = query.shape[POSITIONS], key.shape[POSITIONS]
        none = torch.empty(0, dtype=torch.uint64, device=query.device)  # the state of a dropout that is off
        found = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, log_sum, None, None, *lengths, 0.0, seen.is_triangle, none, none,
            scale=scale,
        )  # fmt: skip
    elif kernel == "efficient":
        bias, none = _bias(seen.mask, query, key, unit=_BIAS_UNIT), torch.empty((), dtype=torch.int64)
        log_sum = F.pad(log_sum, (0, -log_sum.shape[-1] % _SUM_UNIT), value=torch.inf)
        # in 16 bits the kernel of torch 2.11 reads outputs as the forward lays them out, whatever their strides say
        out = out.transpose(HEADS, POSITIONS).contiguous().transpose(HEADS, POSITIONS)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, bias, out, log_sum, none, none, 0.0, [True, True, True, False],
            seen.is_triangle, scale=scale,
        )[:3]  # fmt: skip
    else:
        bias = _bias(seen.mask, query, key)
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, log_sum, 0.0, seen.is_triangle, attn_mask=bias, scale=scale
        )
    of_query, of_key, of_value = (each.to(exact(query.dtype)) for each in found)
    return of_query, _of_own(of_key, times), _of_own(of_value, times)


def _kernel_of(query: Tensor, value: Tensor, seen: Seen) -> str:
    width, value_width = query.shape[-1], value.shape[-1]
    if seen.mask is None and has_flash(query, value):
        return "flash"
    if is_on_gpu(query):
        are_even = width % _WIDTH_UNIT == 0 and value_width % _WIDTH_UNIT == 0
        return "efficient" if are_even and query.dtype != torch.float64 else "plain"
    return "cpu" if query.device.type == "cpu" and width == value_width else "plain"


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, seen: Seen, scale: float) -> Softmax:
    scores = _scores(query, key, seen, scale)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return Softmax(weights @ value.to(scores.dtype), log_sum)


def _plain_gradients(query: Tensor, key: Tensor, value: Tensor, seen: Seen, whole: Whole, scale: float) -> Three:
    scores = _scores(query, key, seen, scale)
    dtype = scores.dtype
    gradient = whole.gradient.to(dtype)
    weights = (scores - whole.log_sum.unsqueeze(-1)).exp()
    along = (gradient * whole.out.to(dtype)).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ value.to(dtype).mT - along) * scale
    return of_scores @ key.to(dtype), of_scores.mT @ query.to(dtype), weights.mT @ gradient


def _scores(query: Tensor, key: Tensor, seen: Seen, scale: float) -> Tensor:
    dtype = exact(query.dtype)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    mask = seen.mask
    if seen.is_triangle:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor, *, unit: int = 1) -> Tensor | None:
    """What is added to scores. The lowest number, not -inf: a query without keys would give NaN in some kernels."""
    if mask is None:
        return None
    queries, keys = query.shape[POSITIONS], key.shape[POSITIONS]
    shape = (*mask.shape[:2], queries, keys + -keys % unit)
    made = torch.zeros(shape, dtype=query.dtype, device=query.device).narrow(-1, 0, keys)
    made.masked_fill_(~mask, torch.finfo(query.dtype).min)
    return made.expand(*query.shape[:2], -1, -1)


def _for_queries(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, HEADS)


def _of_own(gradient: Tensor, times: int) -> Tensor:
    """Of a key-value head, over its query heads."""
    return gradient if times == 1 else gradient.view(gradient.shape[0], -1, times, *gradient.shape[2:]).sum(HEADS + 1)
