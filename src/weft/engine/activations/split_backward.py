"""Split backward: input gradients first, gradients of weight matrices in a later call.

Inside the mode, every linear layer saves (input, gradient of the output) instead of computing its weight gradient;
`run` computes them all, by autograd's own formula: dW = dY' X. Other gradients (norms, biases, embeddings, fused
experts) are computed in the input backward. It works below recompute and gathering alike, since it is part of the
forward; autograd's graph stays intact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class LateGradient:
    """A weight gradient that is computed later, from the gradient of the product's output."""

    weight: Tensor
    output_gradient: Tensor
    compute: Callable[[], Tensor]


class SplitBackward(TorchFunctionMode):
    """Enter around one forward; call `run` after its backward."""

    alive: ClassVar[WeakSet[SplitBackward]] = WeakSet()  # for measurements: saved gradients belong to no graph
    active: ClassVar[SplitBackward | None] = None  # torch turns the mode off in backward; `splitting_again` turns it on

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[LateGradient] = []
        SplitBackward.alive.add(self)

    @property
    def gradients(self) -> list[Tensor]:
        """Output gradients whose weight gradients are still to be computed."""
        return [one.output_gradient for one in self.waiting]

    def __enter__(self) -> SplitBackward:
        SplitBackward.active = self
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        SplitBackward.active = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def run(self) -> None:
        """Accumulate the gradients of all waiting weights into the weights (through their casts, if any)."""
        while self.waiting:  # each is freed before the next gradient is computed
            one = self.waiting.pop(0)
            with torch.no_grad():
                gradient = one.compute()
            torch.autograd.backward(one.weight, gradient)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # an input without gradient would end the backward before this product is reached
        if not (input.requires_grad and weight.requires_grad):
            return F.linear(input, weight, bias)
        # the weight is passed in a tuple: as a tensor it would be part of the graph that the input backward frees
        return _SplitProduct.apply(input, weight.detach(), bias, (weight,), self.waiting)  # type: ignore[no-any-return, no-untyped-call]


def splitting_again() -> AbstractContextManager[Any]:
    """The context in which a backward must repeat the forward that is running now."""
    return SplitBackward.active or nullcontext()


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, owner: tuple[Tensor], waiting: list[LateGradient]
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.owner, ctx.waiting, ctx.has_bias = owner, waiting, bias is not None
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        # detached: an input with its graph would hold this node, which holds the list, and nothing would ever be freed
        ctx.waiting.append(LateGradient(ctx.owner[0], grad, functools.partial(_of_weight, input.detach(), grad)))
        own_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad @ weight, None, own_bias, None, None


def _of_weight(x: Tensor, grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).T @ x.flatten(0, -2)
