"""The head and its cross-entropy as one operation: logits exist for one chunk of rows at a time, never in full.

The model's own forward runs. Its head returns `LazyLogits`, which record how to compute the logits; scales and soft
caps (tanh) of the model's code are recorded too, any other operation computes the full logits, as without this. The
loss is computed inside the model's forward, while a sharded head is still gathered:

    for each chunk of rows:  z = h W^T;  z <- d(sum of losses)/dz, in place;  dh = z W;  dW += z^T h (float32)

so gradients are ready with the loss, and the backward only scales them. A head sharded by vocabulary has a slice of z
on each rank, and so a partial dh; its `Slice` sums (`engine/tp/chunked_loss.py`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from weft.engine.kernels.cross_entropy import Cap, cross_entropy_
from weft.engine.kernels.triton_here import has_triton
from weft.engine.objective import TokenLoss, is_hugging_face, logits_of, token_loss_sum
from weft.engine.wrap_forward import Forward, wrap_forward

CHUNK_ELEMENTS = 2**29  # logits per chunk: 1 GiB in bfloat16
_ROWS = 64  # chunks are multiples of this many rows: matmuls of odd sizes are slow
_UNCHANGED = ("float", "to", "contiguous", "clone")  # the loss is computed in float32 anyway, from the head's output


class Slice(Protocol):
    """The differences on a rank with a slice of the vocabulary."""

    @property
    def most_tokens(self) -> int:
        """The size of the largest slice: all ranks use the same chunks of rows."""
        ...

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Wraps the head's input, whose gradient is a partial sum on each rank."""
        ...

    def take_loss(
        self, logits: torch.Tensor, labels: torch.Tensor, cap: Cap, *, wants_gradient: bool
    ) -> torch.Tensor: ...


class HeadLoss:
    """Wraps a model and its head; inside `given(labels)` a call of the model returns the summed loss.

    `own`: the slice of a sharded head; `token_loss` is then the loss of its forward's output."""

    def __init__(
        self, model: nn.Module, head: nn.Linear, own: Slice | None = None, token_loss: TokenLoss | None = None
    ) -> None:
        self._head, self.own = head, own
        self._token_loss = token_loss or token_loss_sum
        self._labels: torch.Tensor | None = None
        self._asked: list[str] = []
        self.full_logits_cause = ""  # the operations of the model's code that needed full logits, in the last forward
        wrap_forward(head, self._around_head)
        wrap_forward(model, self._around_model)

    @contextmanager
    def given(self, labels: torch.Tensor) -> Iterator[None]:
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def _around_head(self, forward: Forward, hidden: torch.Tensor) -> Any:
        if self._labels is None or hidden.shape[:-1] != self._labels.shape:
            return forward(hidden)
        lazy = LazyLogits(hidden, self._head.weight, self._head.bias, own=self.own)
        lazy.make, self._asked = functools.partial(forward, hidden), lazy.asked
        return lazy

    def _around_model(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        labels = self._labels
        if labels is None:
            return forward(*args, **kwargs)
        self._asked = []
        logits = logits_of(forward(*args, **kwargs))
        self.full_logits_cause = ", ".join(dict.fromkeys(self._asked))
        if isinstance(logits, LazyLogits):
            return logits.loss_sum(labels, self._token_loss)
        return self._token_loss(logits, labels)


def fuse_loss(
    model: nn.Module, *, is_asked: bool, own: Slice | None = None, token_loss: TokenLoss | None = None
) -> tuple[HeadLoss | None, tuple[str, ...]]:
    """Fuse the model's head with its loss if asked and possible; else None, and a note with the reason."""
    if not is_asked:
        return None, ()
    head, why_not = find_head(model) if is_hugging_face(model) else (None, "the model is not from Hugging Face")
    if head is None:
        return None, (f"the loss is not fused with the head: {why_not}",)
    return HeadLoss(model, head, own, token_loss), ()


def find_head(model: nn.Module) -> tuple[nn.Linear | None, str]:
    """The head to fuse the loss with; or None, and the reason."""
    given = getattr(model, "get_output_embeddings", lambda: None)()
    if given is None:
        return None, "the model has no output embeddings"
    if type(given) is not nn.Linear:
        return None, f"the head is a {type(given).__name__}, not a linear layer"
    return given, ""


class LazyLogits:
    """hidden W^T + b, scaled and capped, not computed. Operations not handled here run on the full tensor."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        own: Slice | None = None,
    ) -> None:
        self._hidden, self._weight, self._bias, self._own = hidden, weight, bias, own
        self._cap = Cap()
        self._full: torch.Tensor | None = None
        self.make: Callable[[], torch.Tensor] = lambda: F.linear(hidden, weight, bias)
        self.asked: list[str] = []  # operations that needed full logits; shared with scaled and capped copies

    def loss_sum(self, labels: torch.Tensor, token_loss: TokenLoss = token_loss_sum) -> torch.Tensor:
        """`token_loss` takes logits as `make` returns them."""
        if self._full is not None:
            return token_loss(self._full, labels)
        hidden = self._hidden if self._own is None else self._own.enter(self._hidden)
        rows, wants = hidden.flatten(0, -2), torch.is_grad_enabled()
        given = (rows, self._weight, self._bias, labels.flatten(), self._cap, self._own, wants)
        loss: torch.Tensor = _FusedLoss.apply(*given)  # type: ignore[no-untyped-call]
        return loss

    def full(self, asked: str) -> torch.Tensor:
        """The head's output, computed once and kept: code may write into it."""
        if self._full is None:
            self.asked.append(asked)
            self._full = self._cap.of(self.make())
        return self._full

    def _then(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a tensor's method of this name."""
        cap = None if self._full is not None else self._cap.then(name, *args) if not kwargs else None
        if cap is not None:
            lazy = copy.copy(self)
            lazy._cap = cap
            return lazy
        if self._full is None and name in _UNCHANGED:
            return self
        return getattr(self.full(name), name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)  # an unknown name is an AttributeError, as for a tensor
        return (
            (lambda *args, **kwargs: self._then(name, *args, **kwargs))
            if callable(attribute)
            else getattr(self.full(name), name)
        )

    def __mul__(self, other: Any) -> Any:
        return self._then("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("div", other)

    def __getitem__(self, index: Any) -> Any:
        return self.full("[]")[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.full("[]=")[index] = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if args and isinstance(args[0], cls) and hasattr(torch.Tensor, name):
            return args[0]._then(name, *args[1:], **(kwargs or {}))
        return func(*_full(args, name), **_full(kwargs or {}, name))


def _on_full(name: str) -> Any:
    return lambda self, *args: getattr(self.full(name.strip("_")), name)(*args)


# Python looks operators up on the class: without these a model that adds a number would raise a TypeError
for _name in ("add", "radd", "sub", "rsub", "neg", "pow", "rtruediv", "lt", "le", "gt", "ge"):
    setattr(LazyLogits, f"__{_name}__", _on_full(f"__{_name}__"))


def _full(value: Any, asked: str) -> Any:
    """`value` with every LazyLogits as a tensor."""
    if isinstance(value, LazyLogits):
        return value.full(asked)
    if isinstance(value, dict):
        return {key: _full(item, asked) for key, item in value.items()}
    return type(value)(_full(item, asked) for item in value) if type(value) in (list, tuple) else value


class _FusedLoss(torch.autograd.Function):
    """The sum of token losses of hidden [rows, width] under weight [vocabulary, width]."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        hidden, weight, bias, labels, cap, own, wants = given
        take_loss = cross_entropy_ if own is None else own.take_loss
        wants_hidden, wants_weight, wants_bias = (wants and needed for needed in ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight: torch.Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        chunks = token_chunks(hidden.shape[0], weight.shape[0] if own is None else own.most_tokens)
        for rows in chunks:
            logits = F.linear(hidden[rows], weight, bias)
            loss += take_loss(logits, labels[rows], cap, wants_gradient=wants)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[rows])
            if wants_weight:
                d_weight = _add_product(d_weight, logits, hidden[rows], is_only=len(chunks) == 1)
            if d_bias is not None:
                d_bias += logits.sum(dim=0, dtype=torch.float32)
            del logits  # before the next chunk is allocated
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        (scale,) = arriving
        gradients = (
            None if gradient is None else _scaled(gradient, scale, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None, None)


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """gradient * scale in float32, rounded once, in one pass: a head's gradient is too large for a second copy.
    A 0-dim scale does not take part in type promotion: a GPU would round it to the gradient's dtype first, and 240
    labels would make all gradients 0.34% too large in bfloat16."""
    made = torch.empty_like(gradient, dtype=dtype)
    if gradient.is_cuda and has_triton() and gradient.is_contiguous():
        from weft.engine.kernels.head_loss_triton import scale_into

        scale_into(made, gradient, scale)
        return made
    return torch.mul(gradient, scale.reshape(1), out=made)


def token_chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Rows in chunks of about equal size, each of at most CHUNK_ELEMENTS logits."""
    most = max(1, CHUNK_ELEMENTS // vocab_size)
    count = -(-num_rows // most)
    size = -(-num_rows // max(1, count))
    size = min(-(-size // _ROWS) * _ROWS, max(most, _ROWS))
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size)]


def _add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, *, is_only: bool) -> torch.Tensor:
    """total + left^T right, in float32 if there are several terms."""
    if is_only:
        return left.t() @ right
    if left.is_cuda and left.dtype != torch.float32:  # accumulates inside the matmul: no separate pass over the sum
        if total is None:
            return torch.mm(left.t(), right, out_dtype=torch.float32)
        return torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    product = left.t() @ right
    return product.float() if total is None else total.add_(product)
