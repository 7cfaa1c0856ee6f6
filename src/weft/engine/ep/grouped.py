"""Experts over rows that are sorted by expert already: transformers' grouped products without its own sorting.

Its `grouped_mm` forward sorts, copies and restores all rows; a dispatcher has sorted them. The products, biases, gate
and norm are the module's. Private names of transformers: `tests/unit/engine/ep/test_grouped.py` fails if they move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Linear = Callable[..., Tensor]


def has_grouped_products(module: nn.Module) -> bool:
    """Whether the module's own forward is transformers' grouped one."""
    config = getattr(module, "config", None)
    names = ("has_gate", "has_bias", "is_transposed", "num_experts")
    return getattr(config, "_experts_implementation", None) == "grouped_mm" and all(
        hasattr(module, name) for name in names
    )


def grouped_linear() -> Linear:
    """transformers' product of groups of rows. Looked up outside of compiled code: its modules load themselves lazily,
    which a graph cannot contain."""
    from transformers.integrations import moe

    return moe._grouped_linear  # type: ignore[no-any-return]


def grouped_forward(module: Any, rows: Tensor, numbers: Tensor, linear: Linear) -> Tensor:
    """Outputs of `rows`, one expert per row; `numbers` ascend. `linear`: `grouped_linear()`."""
    counts = torch.zeros(module.num_experts, dtype=torch.int32, device=rows.device)
    ends = counts.scatter_add(0, numbers, torch.ones_like(numbers, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    made = _product(module, "gate_up_proj" if module.has_gate else "up_proj", rows, numbers, ends, linear)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = _product(module, "down_proj", made, numbers, ends, linear)
    # transformers 5.17 has no such norm
    return module.post_expert_norm(made) if getattr(module, "has_post_expert_norm", False) else made


def _product(module: Any, name: str, rows: Tensor, numbers: Tensor, ends: Tensor, linear: Linear) -> Tensor:
    bias = getattr(module, f"{name}_bias")[numbers] if module.has_bias else None
    weight = getattr(module, name)
    own = getattr(module, "own_product", None)  # in float8
    if own is not None:
        made: Tensor = own(name, rows, weight, ends)
        return made if bias is None else made + bias
    return linear(rows, weight, ends, bias=bias, is_transposed=module.is_transposed)
