"""A module that computes in float32, whatever the precision of the rest: a router, or the head.

Its inputs and parameters are cast around its own forward; gradients flow back through the casts. It is part of the
forward, so it is repeated in a recomputed one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import NotBuiltError
from weft.core.precision import PrecisionPolicy
from weft.engine.wrap_forward import Forward, wrap_forward


def widen_head(model: nn.Module, precision: PrecisionPolicy) -> None:
    """Logits in float32, if the policy has them so beside weights in 16 bits."""
    if not precision.has_wide_logits:
        return
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        raise NotBuiltError(
            f"{type(model).__name__} names no head, so its logits cannot be computed in float32",
            hint="leave precision.logits out of plan.toml",
        )
    wrap_forward(head, InFloat32(head))


class InFloat32:
    """A layer around a module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        places = [
            (owner, key, value)
            for owner in self._module.modules()
            for key, value in owner._parameters.items()
            if value is not None and value.is_floating_point()
        ]
        # try: recomputation ends with an exception, which must not leave casts in the place of parameters
        try:
            for owner, key, value in places:
                owner._parameters[key] = value.float()  # type: ignore[assignment]
            return forward(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})
        finally:
            for owner, key, value in places:
                owner._parameters[key] = value


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value
