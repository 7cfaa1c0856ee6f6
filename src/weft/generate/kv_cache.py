"""A key-value cache in float8, int8 or int4: codes, and one bfloat16 scale per token and head. No calibration.

    scale = max|vector| / largest code        vector ~ code * scale

Vectors are rounded when they arrive and read back for the attention of their layer, also in the prompt's own forward:
a text does not depend on how its tokens were grouped into forwards. A sliding layer keeps the tokens of its window.
Layers without keys and values (recurrent states) and layers with caches of their own keep transformers' cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

# Capacity grows by this share, so that a long text copies its cache a logarithmic number of times.
_GROWTH = 0.25
_FIRST_TOKENS = 64


@dataclass(frozen=True)
class CacheFormat:
    """How a vector is stored: `codes_per_byte` codes in a byte."""

    largest: float
    is_float: bool = False
    codes_per_byte: int = 1

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [..., bytes] and scales [..., 1] of vectors [..., features]."""
        peak = vectors.abs().amax(-1, keepdim=True).float() / self.largest
        scale = peak.clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()  # float16 has no scale for small vectors
        codes = (vectors.float() / scale.float()).clamp(-self.largest, self.largest)
        if self.is_float:
            return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale
        whole = codes.round().to(torch.int8)
        if self.codes_per_byte == 1:
            return whole.view(torch.uint8), scale
        low, high = (whole + 8).view(torch.uint8).reshape(*whole.shape[:-1], -1, 2).unbind(-1)
        return low | (high << 4), scale

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if self.is_float:
            values = codes.view(torch.float8_e4m3fn).to(dtype)
        elif self.codes_per_byte == 1:
            values = codes.view(torch.int8).to(dtype)
        else:
            values = (torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8).to(dtype)
        return values * scale.to(dtype)


FORMATS = {
    "fp8": CacheFormat(torch.finfo(torch.float8_e4m3fn).max, is_float=True),
    "int8": CacheFormat(127.0),
    "int4": CacheFormat(7.0, codes_per_byte=2),
}


class _Codes:
    """Codes and scales of one tensor of keys or values [rows, heads, tokens, ...], with room for more tokens."""

    def __init__(self, form: CacheFormat) -> None:
        self._form = form
        self._tensors: tuple[Tensor, ...] = ()
        self.num_tokens = 0

    def append(self, states: Tensor) -> None:
        made = self._form.encode(states)
        needed = self.num_tokens + states.shape[-2]
        if not self._tensors or needed > self._tensors[0].shape[-2]:
            capacity = max(needed, int(self.num_tokens * (1 + _GROWTH)), _FIRST_TOKENS)
            self._tensors = tuple(self._moved(index, one, capacity) for index, one in enumerate(made))
        for kept, one in zip(self._tensors, made, strict=True):
            kept[:, :, self.num_tokens : needed] = one
        self.num_tokens = needed

    def read(self, dtype: torch.dtype) -> Tensor:
        codes, scale = (one[:, :, : self.num_tokens] for one in self._tensors)
        return self._form.decode(codes, scale, dtype)

    def keep_last(self, num_tokens: int) -> None:
        """Forget all but the last tokens."""
        if self.num_tokens > num_tokens:
            first = self.num_tokens - num_tokens
            for one in self._tensors:
                one[:, :, :num_tokens] = one[:, :, first : self.num_tokens].clone()
            self.num_tokens = num_tokens

    def apply(self, change: Any) -> None:
        """Change the rows of every tensor."""
        self._tensors = tuple(change(one) for one in self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held, without room for more."""
        return sum(one[:, :, : self.num_tokens].numel() * one.element_size() for one in self._tensors)

    def _moved(self, index: int, like: Tensor, capacity: int) -> Tensor:
        rows, heads, _, *rest = like.shape
        made = torch.empty(rows, heads, capacity, *rest, dtype=like.dtype, device=like.device)
        if self._tensors:
            made[:, :, : self.num_tokens] = self._tensors[index][:, :, : self.num_tokens]
        return made


class LowBitLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One layer's keys and values as codes; with `window`, of the last `window - 1` tokens."""

    is_croppable = False
    is_compileable = False

    def __init__(self, form: CacheFormat, *, window: int | None = None) -> None:
        super().__init__()
        self._form = form
        self._window = window
        self.is_sliding = window is not None
        self._seen = 0
        self._codes: tuple[_Codes, _Codes] = (_Codes(form), _Codes(form))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._seen += key_states.shape[-2]
        read = []
        for codes, states in zip(self._codes, (key_states, value_states), strict=True):
            codes.append(states)
            read.append(codes.read(states.dtype))
            if self._window is not None:
                codes.keep_last(self._window - 1)
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self._codes[0].num_tokens
        return held + query_length, self._seen - held

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return self._window if self._window is not None else -1

    def reset(self) -> None:
        self._codes = (_Codes(self._form), _Codes(self._form))
        self._seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for codes in self._codes:
            codes.apply(lambda one: one.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        for codes in self._codes:
            codes.apply(lambda one: one.index_select(0, indices.to(one.device)))

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes for codes in self._codes)


def low_bit_cache(config: PretrainedConfig, kind: str) -> DynamicCache:
    """The cache that transformers would make, with keys and values as codes where it has plain ones."""
    cache = DynamicCache(config=config)
    if not cache.layers:  # a config that names no layers: transformers adds plain ones as they are used
        cache.layers = [DynamicLayer() for _ in range(config.get_text_config().num_hidden_layers)]
    cache.layers = [_low_bit(layer, FORMATS[kind]) for layer in cache.layers]
    return cache


def cache_bytes(cache: Any) -> int:
    """Bytes of the tokens that a cache holds."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LowBitLayer):
            total += layer.nbytes
        else:
            total += sum(one.nbytes for one in vars(layer).values() if isinstance(one, Tensor) and one.ndim > 1)
    return total


def layers_in_16_bits(cache: Any) -> int:
    """The number of layers that keep transformers' own cache."""
    return sum(not isinstance(layer, LowBitLayer) for layer in cache.layers)


def _low_bit(layer: Any, form: CacheFormat) -> Any:
    # subclasses hold more than keys and values
    if type(layer) is DynamicLayer:
        return LowBitLayer(form)
    if type(layer) is DynamicSlidingWindowLayer:
        return LowBitLayer(form, window=layer.sliding_window)
    return layer
