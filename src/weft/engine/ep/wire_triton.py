"""The GPU kernels of `wire.py`: each reads its rows once and writes its output once, with the bits of the CPU's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.experts import WIRE_BLOCK

BLOCKS = 16  # of a row that one program takes, at most


def pack(rows: Tensor, made: Tensor) -> Tensor:
    """Write `rows` into `made`, int32 words."""
    if made.numel():
        _pack[_grid(rows)](
            rows, made.view(torch.float8_e4m3fn), made.view(torch.float32), rows.shape[1], _num_blocks(rows),
            size=WIRE_BLOCK, taken=_taken(rows),
        )  # fmt: skip
    return made


def unpack(received: Tensor, made: Tensor) -> Tensor:
    """Write the rows of `received`, int32 words, into `made`."""
    if made.numel():
        _unpack[_grid(made)](
            received.view(torch.float8_e4m3fn), received.view(torch.float32), made, made.shape[1], _num_blocks(made),
            size=WIRE_BLOCK, taken=_taken(made),
        )  # fmt: skip
    return made


def _num_blocks(rows: Tensor) -> int:
    return -(-rows.shape[1] // WIRE_BLOCK)


def _taken(rows: Tensor) -> int:
    return min(BLOCKS, 1 << (_num_blocks(rows) - 1).bit_length())


def _grid(rows: Tensor) -> tuple[int, int]:
    return (len(rows), triton.cdiv(_num_blocks(rows), _taken(rows)))


@triton.jit
def _pack(rows, elements, scales, width, num_blocks, size: tl.constexpr, taken: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * taken + tl.arange(0, taken)
    column = block[:, None] * size + tl.arange(0, size)[None, :]
    value = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    # as integers the magnitudes compare alike, and a NaN is the largest
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = bits >> 23
    power = tl.maximum(exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
    scale = tl.where(exponent == 0xFF, 0x7F800001, power << 23).to(tl.float32, bitcast=True)
    is_block = block < num_blocks
    packed = (value / scale[:, None]).to(elements.dtype.element_ty)
    tl.store(elements + row * num_blocks * (size + 4) + column, packed, mask=is_block[:, None])
    tl.store(scales + row * num_blocks * (size // 4 + 1) + num_blocks * (size // 4) + block, scale, mask=is_block)


@triton.jit
def _unpack(elements, scales, made, width, num_blocks, size: tl.constexpr, taken: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * taken + tl.arange(0, taken)
    column = block[:, None] * size + tl.arange(0, size)[None, :]
    inside = column < width
    scale = tl.load(
        scales + row * num_blocks * (size // 4 + 1) + num_blocks * (size // 4) + block, mask=block < num_blocks
    )
    value = tl.load(elements + row * num_blocks * (size + 4) + column, mask=inside).to(tl.float32) * scale[:, None]
    tl.store(made + row * width + column, value.to(made.dtype.element_ty), mask=inside)
