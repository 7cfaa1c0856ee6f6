"""The attention that a ring of ranks can sum up part by part: a softmax of scaled products, with sinks in its sum.

`softmax_attention` says what it is, for the probe; `engine/cp/ring.py` computes the same from parts of the keys.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Attention = Callable[..., Any]


def own_function(module: nn.Module, implementation: str, known: Callable[[str], Attention | None]) -> Attention | None:
    """The function that `module` would call; `known` looks into the registry of transformers."""
    found = known(implementation)
    eager: Attention | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return found or eager


def scale_of(query: Tensor, arguments: Mapping[str, Any]) -> float:
    given = arguments.get("scaling")
    return 1 / math.sqrt(query.shape[-1]) if given is None else float(given)


def sinks_of(module: nn.Module, heads: int, arguments: Mapping[str, Any]) -> Tensor | None:
    """A number per head in each softmax's sum, handed to attention or the module's own."""
    found = [*arguments.values(), *module._parameters.values()]
    return next((each for each in found if is_by_head(each, heads)), None)


def is_by_head(given: Any, heads: int) -> bool:
    return isinstance(given, Tensor) and given.ndim == 1 and given.shape[0] == heads


def is_allowed(mask: Tensor) -> Tensor:
    """A mask as booleans; one that is added to scores has 0 where a key is seen."""
    return mask if mask.dtype == torch.bool else mask == 0


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, *, scale: float, sinks: Tensor | None
) -> Tensor:
    """[rows, positions, heads, width], in one piece."""
    if (times := query.shape[1] // key.shape[1]) > 1:
        key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)
