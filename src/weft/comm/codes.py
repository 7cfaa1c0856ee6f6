"""Numbers as they travel: encoded row by row, with one float32 scale per block of 256 elements for 8-bit formats.

    int8          code = round(x / s), s = largest magnitude of the block / 127     error at most s / 2
    float8_e4m3   code = float8(x / s), s = largest magnitude of the block / 448    error at most |x| / 16, or s / 1024
    bfloat16      no scale                                                          error at most |x| / 256

A row is one message: its scales, as bytes, then its codes. A block of a row never reaches into the next one, so a rank
needs nothing but its message to decode it. NaN and infinity stay NaN or infinite: an overflow is seen on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.wire_bytes import BLOCK, CODED, SCALE_BYTES

E4M3 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a block of zeros: 0 / s must be 0
WIRE_DTYPES = {
    "int8": torch.int8,
    "float8_e4m3": torch.uint8,  # Gloo has no float8
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def encode(values: Tensor, name: str) -> Tensor:
    """Messages [rows, elements of a message] of `values` [rows, count], in the format of this name."""
    if name not in CODED:
        return values.to(WIRE_DTYPES[name])
    rows, count = values.shape
    blocks = _in_blocks(values.float())
    least, most = torch.aminmax(blocks, dim=2)
    # a tensor: CUDA divides by a number as it multiplies by its reciprocal, which may be another last bit
    largest = torch.full((), _LARGEST[name], device=values.device)
    scales = torch.maximum(most, -least).div_(largest).clamp_min_(_SMALLEST_SCALE)
    scaled = (blocks / scales.unsqueeze(2)).view(rows, -1)[:, :count]
    codes = scaled.round_().to(torch.int8) if name == "int8" else scaled.clamp_(-448.0, 448.0).to(E4M3)
    dtype = WIRE_DTYPES[name]
    return torch.cat([scales.view(dtype), codes.view(dtype)], dim=1)


def decode(messages: Tensor, count: int, name: str) -> Tensor:
    """The values [rows, count] of `messages`, in float32."""
    if name not in CODED:
        return messages.float()
    scale_bytes = SCALE_BYTES * -(-count // BLOCK)
    # a copy: scales of a message among others need not begin at a multiple of four bytes
    own = messages[:, :scale_bytes].clone(memory_format=torch.contiguous_format)
    scales = own.view(-1).view(torch.float32).view(len(messages), -1)
    codes = messages[:, scale_bytes:]
    numbers = codes.float() if name == "int8" else codes.contiguous().view(E4M3).float()
    return (_in_blocks(numbers) * scales.unsqueeze(2)).view(len(messages), -1)[:, :count]


def _in_blocks(values: Tensor) -> Tensor:
    """[rows, blocks, 256], the last block of each row filled up with zeros."""
    missing = -values.shape[1] % BLOCK
    padded = F.pad(values, (0, missing)) if missing else values
    return padded.reshape(len(values), -1, BLOCK)
