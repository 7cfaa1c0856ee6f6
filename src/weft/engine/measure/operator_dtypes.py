"""Dtypes of components that only operators show: statistics of norms, softmax, products, losses of routers.

    norm_statistics   what `rsqrt` reads, one number per row; the saved statistics of a fused norm on a GPU
    softmax           scores of attention [batch, heads, queries, keys]; the log-sum-exps of a fused kernel
    products          operands inside the linear layers of one block; tf32 where the GPU rounds float32 operands to it
    experts           operands of grouped products
    aux_loss          the sums that a router's losses are made of
    gather            shards quantised on their way

A fused norm on a CPU computes in float32 and saves its statistics in the dtype of its input: they show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.precision import E2M1
from weft.engine.kernels.float8 import Float8Linear
from weft.engine.kernels.float8_operands import E4M3

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}  # and the place of an operand
_FUSED_NORMS = ("aten::native_layer_norm", "aten::_fused_rms_norm")
_FUSED_ATTENTION = "aten::_scaled_dot_product_"
Found = Callable[[str, torch.dtype | str], None]


class OperatorDtypes:
    """A listener of `OperatorWatch`."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._linears: list[nn.Module] = []  # whose forward runs, innermost last

    @contextmanager
    def inside_linears(self, block: nn.Module, *, without: list[nn.Module]) -> Iterator[None]:
        """Look at products in the linear layers of `block`; `without`: modules that have a format of their own."""
        hidden = {inner for module in without for inner in module.modules()}
        linears = [module for module in block.modules() if isinstance(module, nn.Linear) and module not in hidden]
        with ExitStack() as stack:
            for linear in linears:
                for handle in (
                    linear.register_forward_pre_hook(lambda module, _args: self._linears.append(module)),
                    linear.register_forward_hook(lambda _module, _args, _output: self._leave()),
                ):
                    stack.callback(handle.remove)
            yield
        self._linears.clear()

    def _leave(self) -> None:
        self._linears.pop()

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = str(func.name()).partition(".")[0]
        if name == "aten::rsqrt" and args[0].ndim > 1 and args[0].shape[-1] == 1:
            self._found("norm_statistics", args[0].dtype)
        elif name in _FUSED_NORMS and result[1].is_cuda:
            self._found("norm_statistics", result[1].dtype)
        elif name in ("aten::_softmax", "aten::_safe_softmax") and result.ndim == 4:
            self._found("softmax", result.dtype)
        elif name.startswith(_FUSED_ATTENTION) and not name.endswith("backward") and isinstance(result, tuple):
            self._found("softmax", result[1].dtype)
        elif name.endswith("grouped_mm") or "::grouped_mm" in name:
            self._found("experts", args[0].dtype)
        elif name == "weft::add_scores":
            self._found("aux_loss", args[1].dtype)
        elif name == "weft::quantise_shard":
            self._found("gather", result.dtype)
        elif self._linears:
            self._saw_product(name, args, result)

    def _saw_product(self, name: str, args: Any, result: Any) -> None:
        if isinstance(self._linears[-1], Float8Linear):  # on a CPU the rounded operands are multiplied in float32
            if isinstance(result, Tensor) and result.dtype == E4M3:
                is_nvfp4 = self._linears[-1].scaling.recipe == "nvfp4"  # codes of it are kept in a byte
                self._found("products", E2M1 if is_nvfp4 else result.dtype)
        elif name in _PRODUCTS:
            operand = args[_PRODUCTS[name]]
            self._found("products", "tf32" if rounds_to_tf32(operand) else operand.dtype)


def rounds_to_tf32(operand: Tensor) -> bool:
    """Whether a product rounds this float32 operand."""
    has_units = operand.is_cuda and torch.cuda.get_device_capability(operand.device) >= (8, 0)
    return operand.dtype == torch.float32 and has_units and torch.backends.cuda.matmul.allow_tf32
