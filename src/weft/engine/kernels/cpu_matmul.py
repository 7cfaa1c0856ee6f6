"""16-bit matmuls on a CPU without 16-bit instructions: in float32, rounded once at the end, as those instructions do.

Torch falls back to a plain loop there: 0.05 GFLOP/s on a Neoverse-N1, a hundredth of float32's. This replaces the
kernels that torch calls, in the whole process, for these operators and dtypes only.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.library import Library, get_kernel

_LOW = (torch.bfloat16, torch.float16)
# Operator -> how many of its results, from the first on, have the operands' dtype; the others are float32.
_OPERATORS = {
    **{f"{name}{form}": 1 for name in ("mm", "addmm", "bmm", "baddbmm") for form in ("", ".out")},
    "_scaled_dot_product_flash_attention_for_cpu": 1,  # private: test_cpu_matmul.py fails if it moves
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU. No public form: test_cpu_matmul.py calls it too."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def patch_low_precision_matmul(dtype: torch.dtype) -> None:
    """For an engine on a CPU that computes in `dtype`; a no-op if the CPU supports it."""
    if dtype in _LOW and not has_bfloat16():
        install()


@functools.cache
def install() -> Library:
    """Once per process; lasts as long as the returned library."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced
        for name, count in _OPERATORS.items():
            library.impl(name, _through_float32(name, count), "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _through_float32(name: str, num_low: int) -> Any:
    kernel = get_kernel(f"aten::{name}", "CPU")

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        low = next((value.dtype for value in args if _is_low(value)), None)
        if low is None:
            return kernel.call_boxed(keys, *args, **kwargs)
        wide = {key: _widened(value) for key, value in kwargs.items()}
        result = kernel.call_boxed(keys, *map(_widened, args), **wide)
        if _is_low(kwargs.get("out")):
            return kwargs["out"].copy_(result)
        if isinstance(result, torch.Tensor):
            return result.to(low)
        return tuple(value.to(low) if index < num_low else value for index, value in enumerate(result))

    return call


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _LOW


def _widened(value: Any) -> Any:
    return value.float() if _is_low(value) else value
