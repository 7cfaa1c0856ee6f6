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

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.float8_section import Float8Recipe
from weft.engine.kernels.float8_operands import BLOCK, Operand, padded

_HOPPER, _BLACKWELL = (9, 0), (10, 0)


def has_kernel(recipe: Float8Recipe, device: torch.device) -> bool:
    """Whether products of this recipe run in the device's float8 units."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if recipe == "rowwise":
        return capability >= _HOPPER
    if recipe == "blockwise":
        return _HOPPER <= capability < _BLACKWELL
    return recipe == "tensorwise"


def multiply_operands(left: Operand, right: Operand, recipe: Float8Recipe, dtype: torch.dtype) -> Tensor:
    """left @ right^T, summed in float32."""
    if has_kernel(recipe, left.codes.device):
        if recipe == "rowwise":
            return _multiply_rows(left, right, dtype)
        if recipe == "tensorwise":
            whole = F.ScalingType.TensorWise
            return F.scaled_mm(left.codes, right.codes.t(), left.scale, whole, right.scale, whole, output_dtype=dtype)
        if recipe == "blockwise":
            return _multiply_blocks(left, right, dtype)
    return (left.restored() @ right.restored().t()).to(dtype)


def _multiply_rows(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    by_row = F.ScalingType.RowWise
    return F.scaled_mm(left.codes, right.codes.t(), left.scale, by_row, right.scale.t(), by_row, output_dtype=dtype)


def _multiply_blocks(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    by_line, by_square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    is_square = right.block[0] == BLOCK and right.codes.shape[0] % BLOCK == 0
    # scales of squares are padded to fours along the contraction; both kinds have their rows innermost
    scale = padded(right.scale, 4).t() if is_square else _rows_innermost(right.row_scales)
    return F.scaled_mm(
        left.codes,
        right.codes.t(),
        _rows_innermost(left.row_scales),
        by_line,
        scale,
        by_square if is_square else by_line,
        output_dtype=dtype,
    )


def _rows_innermost(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()
