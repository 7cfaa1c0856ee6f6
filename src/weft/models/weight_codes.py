"""Low-bit codes of a matrix: integer or float8 codes with scales, rounded to nearest.

    weight ~ code * scale        scale = clip * max|group| / largest code, rounded to the dtype it is stored in

One scale per row, or per group of columns of a row. `clip` of int4 is the one of a few that errs least in squares, per
group; others use 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD_BITS = 32
_CLIPS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76)
# Blocks of rows bound the memory of the search: each clip needs a few float32 copies of a block.
_BLOCK_NUMBERS = 4 * 1024 * 1024


@dataclass(frozen=True)
class WeightFormat:
    """A stored format of weights; `group_size` 0 is one scale per row."""

    num_bits: int
    is_float: bool = False
    group_size: int = 0
    clips: tuple[float, ...] = (1.0,)

    @property
    def largest(self) -> float:
        """The value that the largest weight of a group is mapped to."""
        return torch.finfo(torch.float8_e4m3fn).max if self.is_float else 2 ** (self.num_bits - 1) - 0.5

    def config(self) -> dict[str, Any]:
        """`weights` of a config group, in compressed-tensors' words."""
        strategy = {"strategy": "group", "group_size": self.group_size} if self.group_size else {"strategy": "channel"}
        kind = "float" if self.is_float else "int"
        return {"num_bits": self.num_bits, "type": kind, "symmetric": True, "dynamic": False} | strategy


GROUP_SIZES = (128, 64, 32)

FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(8),
    "int4": WeightFormat(4, group_size=128, clips=_CLIPS),
    "float8": WeightFormat(8, is_float=True),
}


def quantise(
    weight: Tensor, form: WeightFormat, *, scale_dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] (int8 or float8) and scales [rows, groups] of a matrix, in blocks of rows.

    `importance` [columns] weighs the squared errors among which a clip is chosen.
    """
    block = max(1, _BLOCK_NUMBERS // weight.shape[1])
    made = [_quantise_rows(rows, form, scale_dtype, importance) for rows in torch.split(weight, block)]
    return torch.cat([codes for codes, _ in made]), torch.cat([scales for _, scales in made])


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 weights [..., rows, columns] that codes and scales [..., rows, groups] stand for."""
    groups = codes.float().reshape(*scales.shape, -1)
    return (groups * scales.float().unsqueeze(-1)).flatten(-2)


def _quantise_rows(
    rows: Tensor, form: WeightFormat, scale_dtype: torch.dtype, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    width = form.group_size or rows.shape[1]
    weights = importance.reshape(1, -1, width) if importance is not None else 1.0
    groups = rows.float().reshape(rows.shape[0], -1, width)
    largest = groups.abs().amax(-1, keepdim=True) / form.largest
    codes, scale = _rounded(groups, form.clips[0] * largest, form, scale_dtype)
    if len(form.clips) > 1:
        error = _squared_error(groups, codes, scale, weights)
        for clip in form.clips[1:]:
            other_codes, other_scale = _rounded(groups, clip * largest, form, scale_dtype)
            other_error = _squared_error(groups, other_codes, other_scale, weights)
            better = other_error < error
            codes, scale = torch.where(better, other_codes, codes), torch.where(better, other_scale, scale)
            error = torch.where(better, other_error, error)
    return codes.flatten(1), scale.squeeze(-1).to(scale_dtype)


def _rounded(groups: Tensor, scale: Tensor, form: WeightFormat, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and the scale as its dtype holds it. A group of zeros gets the least scale, and codes 0."""
    scale = scale.clamp_min(torch.finfo(scale_dtype).tiny).to(scale_dtype).float()
    return to_codes(groups / scale, form), scale


def _squared_error(groups: Tensor, codes: Tensor, scale: Tensor, weights: Tensor | float) -> Tensor:
    return ((codes.float() * scale - groups).square() * weights).sum(-1, keepdim=True)


def to_codes(values: Tensor, form: WeightFormat) -> Tensor:
    """The nearest codes of values that are divided by their scales."""
    if form.is_float:
        return values.clamp(-form.largest, form.largest).to(torch.float8_e4m3fn)
    top = 2 ** (form.num_bits - 1)
    return values.round().clamp(-top, top - 1).to(torch.int8)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Signed codes [rows, columns] as int32 words [rows, words], lowest bits first, offset to be unsigned."""
    per_word = WORD_BITS // num_bits
    unsigned = (codes.to(torch.int32) + 2 ** (num_bits - 1)).reshape(codes.shape[0], -1, per_word)
    words = torch.zeros(unsigned.shape[:2], dtype=torch.int32)
    for place in range(per_word):
        words |= unsigned[..., place] << (num_bits * place)
    return words
