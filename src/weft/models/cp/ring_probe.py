"""Whether a ring can carry a model's attention: asked of its own attention functions, no list of families.

A ring adds up parts of a softmax, so a rank calls no attention function of the model. Each function of a small model
with the same structure is compared with `softmax_attention` on random queries and keys, with large scores (a soft cap
shows) and small ones (a sink shows). A bias in a mask is found in the mask's values.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # no public form; a dry run's tensors have no values

from weft.models.cp.probe import FAILURES, Asked, replaced_attention, small_model
from weft.models.cp.softmax import Attention, is_allowed, own_function, scale_of, sinks_of, softmax_attention

_LENGTH = 16
_SPREADS = (0.3, 20.0)  # of scores
_DIFFERENCE = 1e-4  # some softmaxes are in float32
_LOWEST = -1e4  # a mask that is added has less, or 0
_KNOWN = ("scaling", "dropout", "sliding_window", "is_causal")


def why_not_in_ring(model: nn.Module) -> str:
    """Why partial softmaxes are not the attention of `model`; "" if they are."""
    return _answer(Asked.of(model), model.config._attn_implementation)  # type: ignore[union-attr]


@functools.lru_cache(maxsize=64)
def _answer(asked: Asked, implementation: str) -> str:
    try:
        with _disable_current_modes():
            probe = _Comparison(small_model(asked.model_class, asked.config), implementation)
            return probe.why_not()
    except FAILURES as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"its attention could not be compared: {lines[0][:160]}"


class _Comparison:
    def __init__(self, model: nn.Module, implementation: str) -> None:
        self._model, self._implementation = model, implementation
        self._names = {id(module): name for name, module in model.named_modules()}
        self._reasons: list[str] = []

    def why_not(self) -> str:
        ids = torch.randint(3, 60, (2, _LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), replaced_attention(self._model, self._compare, masks=self._implementation):
            self._model(input_ids=ids, position_ids=torch.arange(_LENGTH).expand(2, -1), use_cache=False)
        return self._reasons[0] if self._reasons else ""

    def _compare(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        from transformers import AttentionInterface

        own = own_function(module, self._implementation, AttentionInterface._global_mapping.get)
        if (
            reason := "has no attention function"
            if own is None
            else _why_other(own, module, (query, key, value), mask, kwargs)
        ):
            self._reasons.append(f"{self._names[id(module)]} ({type(module).__name__}) {reason}")
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return heads.transpose(1, 2).contiguous(), None


def _why_other(
    own: Attention, module: nn.Module, given: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, kwargs: dict[str, Any]
) -> str:
    """Why `own` is not a softmax of scaled products here; "" if it is."""
    query, heads = given[0], given[0].shape[1]
    if mask is not None and mask.dtype != torch.bool and ((mask != 0) & (mask > _LOWEST)).any():
        return "adds a bias to its scores, by position"
    generator, scale = torch.Generator().manual_seed(0), scale_of(query, kwargs)
    causal = torch.ones(query.shape[2], given[1].shape[2], dtype=torch.bool).tril()
    allowed, sinks = causal if mask is None else is_allowed(mask), sinks_of(module, heads, kwargs)
    for spread in _SPREADS:
        q, k, v = (torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in given)
        q = q * (spread / (scale * math.sqrt(query.shape[-1])))
        out = own(module, q, k, v, mask, **kwargs)[0]
        expected = softmax_attention(q, k, v, allowed, scale=scale, sinks=sinks)
        if out.shape != expected.shape or not ((out - expected).abs().max() < _DIFFERENCE * expected.abs().max()):
            return f"attends otherwise than by a softmax of scaled products{_named(kwargs)}"
    return ""


def _named(kwargs: dict[str, Any]) -> str:
    """Numbers that its function is given, in words."""
    numbers = [
        f"{name} = {given}"
        for name, given in kwargs.items()
        if name not in _KNOWN and isinstance(given, int | float) and not isinstance(given, bool)
    ]
    return f" ({', '.join(numbers)})" if numbers else ""
