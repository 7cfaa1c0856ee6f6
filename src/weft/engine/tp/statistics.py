"""Norms over sharded features: inside a norm's forward, reductions over the last dimension span the ranks.

    mean = (sum over the group of local sums) / width          backward: the statistic's gradient is summed likewise

Each rank uses a statistic for its local features alone, so forward and backward are an all-reduce each. The calls of a
norm decide, not its class: a mode sees every torch function while the norm runs. Element-wise functions pass, known
reductions are replaced, any other function is refused: never silently computed over a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.core.errors import NotBuiltError
from weft.engine.collectives import enter, leave, summed
from weft.engine.wrap_forward import Layer

# Neither `shape` nor `size`: a norm that divides a sum by its size would divide by the slice's.
_PASSING = """
    abs add addcmul bfloat16 clamp clamp_min clone contiguous detach dim div double exp expand_as float half
    is_complex is_floating_point mul multiply neg ones_like pow reciprocal rsqrt rsub sigmoid silu sqrt square sub
    subtract tanh to true_divide type type_as unsqueeze zeros_like add_ clamp_ clamp_min_ div_ mul_ pow_ rsqrt_ sqrt_
    sub_ __add__ __iadd__ __imul__ __itruediv__ __mul__ __neg__ __pow__ __radd__ __rmul__ __rpow__ __rsub__
    __rtruediv__ __sub__ __truediv__
"""
_ELEMENTWISE = frozenset(_PASSING.split())
_ATTRIBUTES = frozenset(("device", "dtype", "is_cpu", "is_cuda", "itemsize", "layout", "ndim", "requires_grad"))
_HALF = (torch.bfloat16, torch.float16)


def spanning(module: nn.Module, group: dist.ProcessGroup, width: int, *, copies: int = 1) -> Layer:
    """A layer for `wrap_forward`: `module` normalises `width` features, and its input has this rank's shard of them.

    `copies` ranks hold each feature (repeated key-value heads): a sum over the ranks counts it as often.
    """
    norm = type(module).__name__

    def layer(forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _Spanning(group=group, width=width, copies=copies, own_width=x.shape[-1], norm=norm):
            return forward(x, *args, **kwargs)

    return layer


class _Spanning(TorchFunctionMode):
    def __init__(self, *, group: dist.ProcessGroup, width: int, copies: int, own_width: int, norm: str) -> None:
        self.group, self.width, self.copies, self.own_width, self.norm = group, width, copies, own_width, norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            return func(*args, **kwargs) if name in _ATTRIBUTES else self.refuse(name)
        if name in _ELEMENTWISE:
            return func(*args, **kwargs)
        replaced = _REDUCTIONS.get(name)
        return self.refuse(name) if replaced is None else replaced(self, *args, **kwargs)

    def refuse(self, name: str) -> Any:
        raise NotBuiltError(
            f"{self.norm} calls {name!r}, which weft cannot compute over sharded features",
            hint="use tensor_parallel.mode = '1d', which replicates this norm",
        )

    def total(self, x: Tensor, *, keepdim: bool) -> Tensor:
        """The sum over all features; half precision is summed in float32."""
        own = x.sum(-1, keepdim=keepdim, dtype=torch.float32 if x.dtype in _HALF else None)
        total = enter(leave(own, self.group), self.group)
        return total if self.copies == 1 else total / self.copies

    def require_features(self, x: Tensor, dim: Any, name: str) -> None:
        """The reduction is over the last dimension alone."""
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        if [place % x.dim() for place in dims] != [x.dim() - 1] or x.shape[-1] != self.own_width:
            self.refuse(f"{name} over dimensions {dims} of {tuple(x.shape)}")


def _sum(
    mode: _Spanning, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    mode.require_features(input, dim, "sum")
    x = input if dtype is None else input.to(dtype)
    return mode.total(x, keepdim=keepdim).to(x.dtype)


def _mean(
    mode: _Spanning, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    mode.require_features(input, dim, "mean")
    x = input if dtype is None else input.to(dtype)
    return (mode.total(x, keepdim=keepdim) / mode.width).to(x.dtype)


def _var(
    mode: _Spanning,
    input: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """From the differences to the mean: the mean of squares minus the square of the mean would cancel."""
    mode.require_features(input, dim, "var")
    less = correction if correction is not None else int(unbiased)
    centred = input - mode.total(input, keepdim=True) / mode.width
    return (mode.total(centred.square(), keepdim=keepdim) / (mode.width - less)).to(input.dtype)


def _std(mode: _Spanning, *args: Any, **kwargs: Any) -> Tensor:
    return _var(mode, *args, **kwargs).sqrt()


def _norm(
    mode: _Spanning, input: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    mode.require_features(input, dim, "norm")
    if p not in (2, "fro"):
        mode.refuse(f"norm of order {p}")
    x = input if dtype is None else input.to(dtype)
    squares = mode.total(x.square(), keepdim=keepdim)
    is_zero = squares == 0  # the root has no gradient there; torch's norm has a gradient of zero
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0).to(x.dtype)


def _vector_norm(
    mode: _Spanning, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    return _norm(mode, x, ord, dim, keepdim, **kwargs)


def _normalize(
    mode: _Spanning, input: Tensor, p: Any = 2, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    return input / _norm(mode, input, p, dim, keepdim=True).clamp_min(eps)


def _layer_norm(
    mode: _Spanning,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    _require_one_dimension(mode, input, normalized_shape)
    return _Normalised.apply(input, weight, bias, eps, True, mode.group, mode.width * mode.copies)  # type: ignore[no-any-return, no-untyped-call]


def _rms_norm(
    mode: _Spanning, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    _require_one_dimension(mode, input, normalized_shape)
    eps = torch.finfo(torch.float32 if input.dtype in _HALF else input.dtype).eps if eps is None else eps
    return _Normalised.apply(input, weight, None, eps, False, mode.group, mode.width * mode.copies)  # type: ignore[no-any-return, no-untyped-call]


def _require_one_dimension(mode: _Spanning, x: Tensor, normalized_shape: Any) -> None:
    mode.require_features(x, -1, "a fused norm")
    if tuple(normalized_shape) not in {(mode.width,), (mode.own_width,)}:
        mode.refuse(f"a fused norm over {tuple(normalized_shape)}")


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "norm": _norm,
    "vector_norm": _vector_norm,
    "linalg_vector_norm": _vector_norm,
    "normalize": _normalize,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}


class _Normalised(torch.autograd.Function):
    """Layer norm, or RMS norm if not centred. Saves what the fused ones save: x and two numbers per token.

    dx = r (g - mean(g) - h mean(g h))          g = dy weight, h = (x - mean) r; an RMS norm has no mean(g)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, is_centred: bool, group: Any, width: int
    ) -> Tensor:
        wide = x.float() if x.dtype in _HALF else x
        mean = summed(wide.sum(-1, keepdim=True), group) / width if is_centred else None
        centred = wide if mean is None else wide - mean
        inverse = torch.rsqrt(summed(centred.square().sum(-1, keepdim=True), group) / width + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.bias_dtype, ctx.group, ctx.width = None if bias is None else bias.dtype, group, width
        out = centred * inverse
        out = out if weight is None else out * weight
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        grad = grad.to(inverse.dtype)
        unit = (x.to(inverse.dtype) if mean is None else x - mean) * inverse
        scaled = grad if weight is None else grad * weight
        products = (scaled * unit).sum(-1, keepdim=True)
        sums = products if mean is None else torch.cat([products, scaled.sum(-1, keepdim=True)], dim=-1)
        means = summed(sums, ctx.group) / ctx.width
        own = scaled - unit * means[..., :1]
        own = (own if mean is None else own - means[..., 1:]) * inverse
        own_weight = None if weight is None else (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        own_bias = None if ctx.bias_dtype is None else grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return own.to(x.dtype), own_weight, own_bias, None, None, None, None
