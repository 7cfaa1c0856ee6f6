"""Rounding of numbers that travel as codes, block by block in plain code: shares nothing with `comm/codes.py`.

A `Rounding` has the rounded numbers and, for each, the largest error that its format allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.core.wire_bytes import BLOCK

# (largest code, relative error of a number, error of a number near zero in scales)
_EIGHT_BITS = {"int8": (127.0, 0.0, 0.5), "float8_e4m3": (448.0, 2.0**-4, 2.0**-10)}
_BFLOAT16 = 2.0**-8
_FLOAT32 = 2.0**-22  # of the divisions and products around a code


class Rounding(NamedTuple):
    values: torch.Tensor
    bound: torch.Tensor


def rounded(values: torch.Tensor, name: str, sizes: Sequence[int] = ()) -> Rounding:
    """A flat float32 tensor as it arrives: one message. Each of its parameters, of these sizes, begins a block."""
    if name == "bfloat16":
        return Rounding(values.bfloat16().float(), values.abs() * _BFLOAT16)
    parameters = torch.split(values, list(sizes) or [values.numel()])
    blocks = [_rounded_block(one, name) for own in parameters for one in torch.split(own, BLOCK) if one.numel()]
    return Rounding(torch.cat([one.values for one in blocks]), torch.cat([one.bound for one in blocks]))


def _rounded_block(block: torch.Tensor, name: str) -> Rounding:
    most, relative, near_zero = _EIGHT_BITS[name]
    largest = block.abs().max()
    if largest == 0:
        return Rounding(block, torch.zeros_like(block))
    scale = torch.clamp(largest / most, min=torch.finfo(torch.float32).tiny)
    codes = torch.round(block / scale) if name == "int8" else (block / scale).to(torch.float8_e4m3fn).float()
    bound = torch.maximum(block.abs() * relative, near_zero * scale) + _FLOAT32 * block.abs()
    return Rounding(codes * scale, bound)


def rounded_like(values: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of any shape and dtype rounded as one message; its real blocks are those of a rank's share."""
    return rounded(values.reshape(-1).float(), name).values.view(values.shape).to(values.dtype)
