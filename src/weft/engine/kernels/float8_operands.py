"""Operands of products in low precision: codes and the scales that restore them, by recipe.

    recipe       a scale for                                        codes
    tensorwise   the operand                                        e4m3; gradients e5m2
    rowwise      a row                                              e4m3
    blockwise    128 elements of a row; 128 x 128 of a weight       e4m3
    mxfp8        32 elements of a row, a power of two (E8M0),       e4m3
                 the least with which no element saturates
    nvfp4        16 elements of a row, in e4m3, times one float32   e2m1, nearest, ties to even; kept in a byte
                 of the operand

All three products of a linear layer have the form left @ right^T with the contracted dimension last, so an operand is a
matrix whose scales never change within a block of a row:

    y  = x w^T           x [M, K], w [N, K]
    dx = g (w^T)^T       g [M, N], w^T [K, N]
    dw = g^T (x^T)^T     g^T [N, M], x^T [K, M]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.core.float8_section import Float8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK, NV_BLOCK = 128, 32, 16
UNIT = 16  # the hardware's: of contractions and outputs
E2M1_MOST = 6.0
Role = Literal["activation", "weight", "gradient"]
_LEAST = 1e-12  # the largest magnitude of zeros


@dataclass(frozen=True)
class Operand:
    """A matrix [rows, columns] as codes; `scale` [row blocks, column blocks] of `block` elements restores it.

    Columns are padded with zeros to whole blocks.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int]

    @property
    def row_scales(self) -> Tensor:
        """The scales [rows, column blocks] of single rows."""
        if self.block[0] == 1:
            return self.scale
        return self.scale.repeat_interleave(self.block[0], 0)[: self.codes.shape[0]]

    def restored(self) -> Tensor:
        """The values in float32."""
        parts = self.codes.float().view(len(self.codes), self.scale.shape[1], -1)
        values: Tensor = (parts * self.row_scales.unsqueeze(-1)).flatten(1)
        return values


def whole_operand(codes: Tensor, scale: Tensor) -> Operand:
    """Codes with one scale."""
    return Operand(codes, scale.view(1, 1), (codes.shape[0], codes.shape[1]))


@dataclass(frozen=True)
class Sharing:
    """How tensor-parallel ranks share an operand: which of its dimensions they divide. Its scales are those of the
    whole operand: largest magnitudes that other ranks have a part of are reduced over `group`."""

    group: dist.ProcessGroup | None = None
    divides_rows: bool = False
    divides_columns: bool = False

    def largest(self, own: Tensor, *, is_of_row: bool) -> Tensor:
        """The largest magnitudes of the whole rows, or of the whole operand."""
        if self.group is not None and (self.divides_columns or (self.divides_rows and not is_of_row)):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.group)
        return own


WHOLE = Sharing()


def quantise_operand(values: Tensor, recipe: Float8Recipe, role: Role, sharing: Sharing = WHOLE) -> Operand:
    """The operand of a product that sums over the last dimension of `values`."""
    if recipe == "rowwise":
        return _by_row(values, sharing)
    if recipe == "blockwise":
        return _by_block(values, (BLOCK if role == "weight" else 1, BLOCK))
    if recipe == "mxfp8":
        return _by_power(values)
    if recipe == "nvfp4":
        return _by_two_levels(values, sharing)
    return _by_tensor(values, E5M2 if role == "gradient" else E4M3, sharing)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that maps the largest magnitude to the largest number of `dtype`."""
    return torch.finfo(dtype).max / largest.float().clamp(min=_LEAST)


def codes_of(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` times `factor` in `dtype`, saturated."""
    most = torch.finfo(dtype).max
    return (values.float() * factor).clamp(-most, most).to(dtype)


def _by_tensor(values: Tensor, dtype: torch.dtype, sharing: Sharing) -> Operand:
    values = padded(values, UNIT)
    factor = scale_of(sharing.largest(values.abs().amax().float(), is_of_row=False), dtype)
    return whole_operand(codes_of(values, factor, dtype), factor.reciprocal())


def _by_row(values: Tensor, sharing: Sharing) -> Operand:
    values = padded(values, UNIT)
    factor = scale_of(sharing.largest(values.abs().amax(1, keepdim=True).float(), is_of_row=True), E4M3)
    return Operand(codes_of(values, factor, E4M3), factor.reciprocal(), (1, values.shape[1]))


def _by_block(values: Tensor, block: tuple[int, int]) -> Operand:
    rows = len(values)
    whole = padded(values, block[1], row_multiple=block[0])
    blocks = whole.reshape(-(-rows // block[0]), block[0], -1, block[1])
    factor = scale_of(blocks.abs().amax((1, 3)), E4M3)
    codes = codes_of(blocks, factor[:, None, :, None], E4M3).reshape(whole.shape)[:rows]
    return Operand(codes, factor.reciprocal(), block)


def _by_power(values: Tensor) -> Operand:
    blocks = padded(values, MX_BLOCK).float().view(len(values), -1, MX_BLOCK)
    part, power = torch.frexp(blocks.abs().amax(2))  # the largest is part x 2^power, 0.5 <= part < 1
    # 448 is 0.875 x 2^9: the least e with largest <= 448 x 2^e
    power = (power - 9 + (part > 0.875)).clamp(-127, 127)
    codes = codes_of(blocks, _power_of_two(-power).unsqueeze(-1), E4M3).flatten(1)
    return Operand(codes, _power_of_two(power), (1, MX_BLOCK))


def _power_of_two(power: Tensor) -> Tensor:
    """By its bits, exact down to 2^-127."""
    return torch.where(power > -127, (power + 127) << 23, 1 << 22).int().view(torch.float32)


def _by_two_levels(values: Tensor, sharing: Sharing) -> Operand:
    blocks = padded(values, NV_BLOCK).float().view(len(values), -1, NV_BLOCK)
    codes, scale = _two_levels(blocks, sharing.largest(blocks.abs().amax(), is_of_row=False))
    return Operand(codes.flatten(1), scale, (1, NV_BLOCK))


# An operator of its own: a compiled division may differ in its last bit, which sends values between two of the eight
# numbers elsewhere (1.8% of a product's norm).
@torch.library.custom_op("weft::two_levels", mutates_args=())
def _two_levels(blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of blocks [rows, blocks, NV_BLOCK], and their scales; `largest` of the whole operand."""
    whole = largest.clamp(min=_LEAST) / (E2M1_MOST * torch.finfo(E4M3).max)
    scale = (blocks.abs().amax(2) / E2M1_MOST / whole).clamp(max=torch.finfo(E4M3).max).to(E4M3).float()
    factor = torch.where(scale > 0, whole.reciprocal() / scale, 0.0)
    return nearest_e2m1(blocks * factor.unsqueeze(-1)).to(E4M3), scale * whole


@_two_levels.register_fake
def _(blocks: Tensor, _largest: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(blocks, dtype=E4M3), blocks.new_empty(blocks.shape[:2])


def nearest_e2m1(values: Tensor) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign; between two of them the one with an even last bit."""
    size = values.abs().clamp(max=E2M1_MOST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, values)


def padded(values: Tensor, multiple: int, *, row_multiple: int = 1) -> Tensor:
    """Zeros behind the last column and row, up to multiples."""
    rows, columns = values.shape
    if columns % multiple == 0 and rows % row_multiple == 0:
        return values
    return F.pad(values, (0, -columns % multiple, 0, -rows % row_multiple))


def padded_codes(codes: Tensor, multiple: int = 1, *, row_multiple: int = 1) -> Tensor:
    """The same for codes, as bytes: torch pads no float8."""
    return padded(codes.view(torch.uint8), multiple, row_multiple=row_multiple).view(codes.dtype)
