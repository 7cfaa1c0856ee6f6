"""A float32 residual stream beside compute in 16 bits (`precision.residual`).

    embedding -> float32 stream -> norm -> bfloat16 -> attention or MLP -> bfloat16 + float32 = float32 stream -> ...

Blocks add inside their own forwards, where a sum of float32 and bfloat16 is float32. So the embedding's output is made
wide, blocks get their stream as it is, and a norm that reads a wide stream computes in float32 and returns 16 bits. A
family whose blocks do more with the stream than to normalise it and to add to it is refused in its first forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import NotBuiltError
from weft.core.precision import PrecisionPolicy
from weft.engine.kernels.wide import InFloat32, widen_head
from weft.engine.precision import cast_floats, torch_dtype
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout
from weft.models.tp.roles import is_norm


def widen(model: nn.Module, layout: ModelLayout, policy: PrecisionPolicy) -> None:
    """Float32 where the policy has it beside weights in 16 bits: logits, the residual stream."""
    widen_head(model, policy)
    widen_residual(model, layout, policy)


def widen_residual(model: nn.Module, layout: ModelLayout, policy: PrecisionPolicy) -> None:
    """Keep the residual stream in float32, if the policy says so beside weights in 16 bits."""
    if not policy.has_wide_residual:
        return
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    if not isinstance(embedding, nn.Module):
        raise _refusal(model, "names no embedding")
    dtype = torch_dtype(policy.weights)
    wrap_forward(embedding, _WideOutput())
    for name, module in model.named_modules():
        if is_norm(module):
            wrap_forward(module, _NormOfStream(module, dtype))
        elif name in layout.blocks:
            wrap_forward(module, _BlockOnStream(model, name, dtype))


class _WideOutput:
    """A layer around the embedding."""

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).float()


class _NormOfStream:
    """A layer around a norm: a wide input is the stream, any other one is left to the norm itself."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._wide, self._dtype = InFloat32(module), dtype

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None or first.dtype != torch.float32:
            return forward(*args, **kwargs)
        return self._wide(forward, *args, **kwargs).to(self._dtype)


class _BlockOnStream:
    """A layer around a block: all inputs but its stream in 16 bits; the stream goes in and out in float32."""

    def __init__(self, model: nn.Module, name: str, dtype: torch.dtype) -> None:
        self._model, self._name, self._dtype = [model], name, dtype  # a list: no copied module has this model inside

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        key = "hidden_states" if "hidden_states" in kwargs else None
        stream = kwargs.pop(key) if key else args[0] if args else None
        if not isinstance(stream, Tensor) or stream.dtype != torch.float32:
            raise self._refusal("gets its stream in another dtype than float32")
        others = cast_floats(args if key else args[1:], self._dtype)
        named = cast_floats(kwargs, self._dtype)
        try:
            output = forward(*others, **named, hidden_states=stream) if key else forward(stream, *others, **named)
        except RuntimeError as error:
            if "dtype" not in str(error) and "scalar type" not in str(error):
                raise
            raise self._refusal("multiplies its stream before any norm") from error
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or first.dtype != torch.float32:
            raise self._refusal("returns its stream in another dtype than float32: a norm follows the addition")
        return output

    def _refusal(self, why: str) -> NotBuiltError:
        return _refusal(self._model[0], f"{why} ({self._name})")


def _refusal(model: nn.Module, why: str) -> NotBuiltError:
    return NotBuiltError(
        f"the residual stream of {type(model).__name__} cannot be kept in float32: it {why}",
        hint="leave precision.residual out of plan.toml",
    )
