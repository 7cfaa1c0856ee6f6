"""Products of low-precision operands: the device's kernel where torch has one, else float32 over restored values.

| recipe     | kernel                                                                    |
| ---------- | ------------------------------------------------------------------------- |
| tensorwise | Ada and later                                                             |
| rowwise    | Hopper and later                                                          |
| blockwise  | Hopper: 1 x 128 with 1 x 128 or 128 x 128                                 |
| mxfp8, nvfp4 | none here                                                               |

Kernels and emulation multiply the same codes by the same scales; they differ in the order of sums alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from weft.core.float8_section import WHOLE, Float8Recipe
from weft.engine.kernels.float8_operands import BLOCK, UNIT, Operand, padded, padded_codes

_HOPPER, _BLACKWELL = (9, 0), (10, 0)
_TYPES = {
    "tensorwise": F.ScalingType.TensorWise,
    "rowwise": F.ScalingType.RowWise,
    "lines": F.ScalingType.BlockWise1x128,
    "squares": F.ScalingType.BlockWise1x128,
}  # of the left operand


def has_kernel(recipe: Float8Recipe, device: torch.device) -> bool:
    """Whether products of this recipe run in the device's float8 units."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if recipe == "rowwise":
        return capability >= _HOPPER
    if recipe == "blockwise":
        return _HOPPER <= capability < _BLACKWELL
    return recipe in WHOLE


def multiply_operands(left: Operand, right: Operand, recipe: Float8Recipe, dtype: torch.dtype) -> Tensor:
    """left @ right^T, summed in float32."""
    if not has_kernel(recipe, left.codes.device):
        return (left.restored() @ right.restored().t()).to(dtype)
    scaling: str = recipe
    scales = left.scale, right.scale
    if recipe == "blockwise":
        is_square = right.block[0] == BLOCK and right.codes.shape[0] % BLOCK == 0
        scaling = "squares" if is_square else "lines"
        scales = left.row_scales, right.scale if is_square else right.row_scales
    out: Tensor = _scaled_mm(left.codes.contiguous(), right.codes.contiguous(), *scales, scaling, dtype)
    return out


# An operator of its own: compilers of torch 2.11 do not trace the one behind `scaled_mm`.
@torch.library.custom_op("weft::scaled_mm", mutates_args=())
def _scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, scaling: str, dtype: torch.dtype
) -> Tensor:
    """The device's kernel. Codes are [M, K] and [N, K], contiguous, K a multiple of 16."""
    rows = len(right)
    if rows % UNIT:
        if len(right_scale) == rows > 1:
            right_scale = padded(right_scale, 1, row_multiple=UNIT)
        right = padded_codes(right, row_multiple=UNIT)
    left_type = right_type = _TYPES[scaling]
    if scaling == "rowwise":
        right_scale = right_scale.t()
    elif scaling == "lines":
        left_scale, right_scale = _rows_innermost(left_scale), _rows_innermost(right_scale)
    elif scaling == "squares":
        # the kernel takes scales of squares in fours along the contraction
        left_scale, right_scale = _rows_innermost(left_scale), padded(right_scale, 4).t()
        right_type = F.ScalingType.BlockWise128x128
    out = F.scaled_mm(left, right.t(), left_scale, left_type, right_scale, right_type, output_dtype=dtype)
    return out if len(right) == rows else out[:, :rows].contiguous()


@_scaled_mm.register_fake
def _(
    left: Tensor, right: Tensor, _left_scale: Tensor, _right_scale: Tensor, _scaling: str, dtype: torch.dtype
) -> Tensor:
    return left.new_empty((len(left), len(right)), dtype=dtype)


@register_flop_formula(torch.ops.weft.scaled_mm)
def _flops(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left.numel() * right[0]


def _rows_innermost(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()
