"""Whether a model passes masks through to attention without reading them. Its own forward answers, no list of families.

A small model runs with tensors as masks, and then with objects that have a shape and nothing else. Attention must get
an object wherever it got a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # no public form; a dry run's tensors have no values

from weft.models.cp.probe import FAILURES, Asked, replaced_attention, small_model

_LENGTH = 16


class OpaqueMask:
    """What takes the place of a mask [rows, 1, queries, keys]."""

    ndim = 4

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape


def passes_masks_through(model: nn.Module) -> bool:
    """False of a model that fails with opaque masks: it changes masks (ALiBi), or makes its own."""
    return _answer(Asked.of(model))


@functools.lru_cache(maxsize=64)
def _answer(asked: Asked) -> bool:
    try:
        with _disable_current_modes(), torch.no_grad():
            model = small_model(asked.model_class, asked.config)
            return _kinds_of_masks(model, _tensor, Tensor) == _kinds_of_masks(model, _opaque, OpaqueMask)
    except FAILURES:
        return False


def _kinds_of_masks(model: nn.Module, masks: Callable[..., Any], expected: type) -> list[bool]:
    """Of each call of attention: whether its mask is of the expected kind."""
    found: list[bool] = []

    def own_value(_module: nn.Module, query: Tensor, _key: Tensor, value: Tensor, mask: Any = None, **_: Any) -> Any:
        found.append(isinstance(mask, expected))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    ids = torch.arange(3, 3 + _LENGTH).expand(2, -1)
    with replaced_attention(model, own_value, masks=masks):
        model(input_ids=ids, position_ids=torch.arange(_LENGTH).expand(2, -1), use_cache=False)
    return found


def _tensor(**given: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    made: Tensor | None = sdpa_mask(**{**given, "allow_is_causal_skip": False})
    return made


def _opaque(batch_size: int, q_length: int, kv_length: int, **_: Any) -> OpaqueMask:
    return OpaqueMask(torch.Size((batch_size, 1, q_length, kv_length)))
