"""Floating-point operations, counted from the operators that run, by torch's formulas.

Attention is counted without its mask: twice the operations of a causal kernel, as torch counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


class FlopCounter:
    """A listener of `OperatorWatch`: `total` counts every matmul, convolution and attention."""

    def __init__(self) -> None:
        self.total = 0

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        formula = _FORMULAS.get(packet, flop_registry.get(packet))
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=result))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values."""
    return _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """The scores again, and the gradients of queries, keys, values and probabilities."""
    return _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2]


def _product(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.numel() * int(right.shape[-1])


def _sum_with_product(_added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    return _product(left, right)


def _grouped(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Rows in groups, each with a matrix of its own: every row is multiplied once."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


aten = torch.ops.aten
_KERNELS = ("flash", "efficient", "cudnn")
# Attention is counted here: torch's formulas refuse grouped-query attention in 2.11 and lack the CPU kernel.
_FORMULAS: dict[Any, Any] = {
    **{getattr(aten, f"_scaled_dot_product_{kernel}_attention"): _attention for kernel in _KERNELS},
    **{getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward"): _attention_backward for kernel in _KERNELS},
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    # torch's formulas of 2.11 refuse the overloads with the dtype of the output
    **dict.fromkeys((aten.mm, aten.bmm), _product),
    **dict.fromkeys((aten.addmm, aten.baddbmm), _sum_with_product),
    aten._grouped_mm: _grouped,  # torch has no formula
}
