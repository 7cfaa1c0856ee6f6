"""A float32 residual stream in the one-process reference, by hooks: shares nothing with `engine/kernels`.

The embedding's output is float32, and blocks get it as it is; a norm of a float32 input computes in float32 and rounds
its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from weft.models.layout import describe


def keep_residual_wide(model: nn.Module, dtype: torch.dtype) -> None:
    """All else computes in `dtype`, in which the parameters are."""

    def narrow(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def cast_others(_: nn.Module, args: Any, kwargs: Any) -> Any:
        has_name = "hidden_states" in kwargs
        stream = kwargs["hidden_states"] if has_name else args[0]
        args, kwargs = tree_map_only(torch.Tensor, narrow, (args, dict(kwargs)))
        if has_name:
            return args, {**kwargs, "hidden_states": stream}
        return (stream, *args[1:]), kwargs

    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    embedding.register_forward_hook(lambda _module, _args, output: output.float())
    for name in describe(model).blocks:
        model.get_submodule(name).register_forward_pre_hook(cast_others, with_kwargs=True)
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and not module._modules:
            module.forward = _WideNorm(module, dtype)


class _WideNorm:
    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._norm, self._own, self._dtype = module, module.forward, dtype

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype != torch.float32:
            return self._own(values)  # type: ignore[no-any-return]
        narrow = dict(self._norm._parameters)
        self._norm._parameters.update({k: v.float() for k, v in narrow.items() if v is not None})  # type: ignore[misc]
        try:
            return self._own(values).to(self._dtype)  # type: ignore[no-any-return]
        finally:
            self._norm._parameters.update(narrow)
