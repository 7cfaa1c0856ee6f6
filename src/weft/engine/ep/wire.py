"""Formats of rows on their way to experts. In float8 a row is packed into int32 words that travel as one tensor:

    [e4m3 elements, 128 per block | one float32 scale per block]

Scales are powers of two, so no value depends on the order of arithmetic, and the values that arrive are exact in
bfloat16. A block with an infinity or NaN arrives as NaN. Packing is not differentiable: the exchanges around it send
gradients as they are. The operators are torch's own custom ones, so a dry run sees what the GPU kernels
(`wire_triton.py`) allocate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.experts import WIRE_BLOCK, WireFormat
from weft.engine.kernels.triton_here import has_triton

E4M3 = torch.float8_e4m3fn
_WORD = 4  # bytes
_WORDS = WIRE_BLOCK // _WORD + 1  # of a block with its scale
_MANTISSA, _EXPONENT = 23, 0xFF  # of float32: bits, and the value of infinities and NaN
_SCALE_EXPONENT = 8  # e4m3's largest number is 1.75 x 2**8
_LARGEST_FRACTION = 0x600000  # the fraction of 1.75, as bits of float32


def packed(rows: Tensor, wire: WireFormat) -> Tensor:
    if wire != "float8":
        return rows
    return torch.ops.weft.pack_float8(rows.contiguous())  # type: ignore[no-any-return]


def unpacked(received: Tensor, wire: WireFormat, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of `width` elements from what `packed` made of them; in float8 they are rounded."""
    if wire != "float8":
        return received
    return torch.ops.weft.unpack_float8(received, width, dtype)  # type: ignore[no-any-return]


def _blocks(width: int) -> int:
    return -(-width // WIRE_BLOCK)


def _scales(largest: Tensor) -> Tensor:
    """The least power of two by which `largest` float32 magnitudes must be divided to fit; NaN if one is not finite."""
    bits = largest.view(torch.int32)
    exponent = bits >> _MANTISSA
    too_large = (bits & ((1 << _MANTISSA) - 1)) > _LARGEST_FRACTION
    power = (exponent - _SCALE_EXPONENT + too_large).clamp(min=1)
    return torch.where(exponent == _EXPONENT, _EXPONENT << _MANTISSA | 1, power << _MANTISSA).view(torch.float32)


@torch.library.custom_op("weft::pack_float8", mutates_args=())
def _pack(rows: Tensor) -> Tensor:
    if _has_kernel(rows):
        from weft.engine.ep.wire_triton import pack

        return pack(rows, _packed_like(rows))
    count, width = rows.shape
    blocks = F.pad(rows.float(), (0, _blocks(width) * WIRE_BLOCK - width)).view(count, _blocks(width), WIRE_BLOCK)
    scales = _scales(blocks.abs().amax(2))
    elements = (blocks / scales.unsqueeze(2)).to(E4M3).flatten(1).view(torch.int32)
    return torch.cat([elements, scales.view(torch.int32)], dim=1)


@torch.library.custom_op("weft::unpack_float8", mutates_args=())
def _unpack(received: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    if _has_kernel(received):
        from weft.engine.ep.wire_triton import unpack

        return unpack(received, received.new_empty(len(received), width, dtype=dtype))
    blocks = _blocks(width)
    elements, scales = received.tensor_split([blocks * (_WORDS - 1)], dim=1)
    values = elements.contiguous().view(E4M3).view(len(received), blocks, WIRE_BLOCK).float()
    values = values * scales.contiguous().view(torch.float32).unsqueeze(2)
    return values.flatten(1)[:, :width].to(dtype).contiguous()


@_pack.register_fake
def _packed_like(rows: Tensor) -> Tensor:
    return rows.new_empty(len(rows), _blocks(rows.shape[1]) * _WORDS, dtype=torch.int32)


@_unpack.register_fake
def _(received: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return received.new_empty(len(received), width, dtype=dtype)


def _has_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype != torch.float64 and has_triton()
