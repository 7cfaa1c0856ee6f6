"""Numbers as they travel: encoded row by row, with one float32 scale per block of 256 elements for 8-bit formats.

    int8          code = round(x / s), s = largest magnitude of the block / 127     error at most s / 2
    float8_e4m3   code = float8(x / s), s = largest magnitude of the block / 448    error at most |x| / 16, or s / 1024
    bfloat16      no scale                                                          error at most |x| / 256

A row is one message: its scales, as bytes, then its codes. A block of a row never reaches into the next one, so a rank
needs nothing but its message to decode it. Nor does it reach from one parameter of the message into the next: copies of
a norm beside shards that differ from rank to rank would get different codes, and drift apart. NaN and infinity stay NaN
or infinite: an overflow is seen on every rank.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.wire_bytes import BLOCK, CODED, num_blocks, scale_bytes

Sizes = tuple[int, ...]  # elements of the parameters of a message

E4M3 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a block of zeros: 0 / s must be 0
WIRE_DTYPES = {
    "int8": torch.int8,
    "float8_e4m3": torch.uint8,  # Gloo has no float8
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def encode(values: Tensor, name: str, sizes: Sizes = ()) -> Tensor:
    """Messages [rows, elements of a message] of `values` [rows, count], in the format of this name. `sizes`: of the
    parameters of each row; one without them."""
    if name not in CODED:
        return values.to(WIRE_DTYPES[name], copy=True)  # it is sent while its numbers become errors
    rows, runs = len(values), _runs(sizes or (values.shape[1],))
    blocks = _in_blocks(values.float(), runs)
    least, most = torch.aminmax(blocks, dim=2)
    # a tensor: CUDA divides by a number as it multiplies by its reciprocal, which may be another last bit
    largest = torch.full((), _LARGEST[name], device=values.device)
    scales = torch.maximum(most, -least).div_(largest).clamp_min_(_SMALLEST_SCALE)
    scaled = (blocks / scales.unsqueeze(2)).view(rows, -1)
    codes = scaled.round_().to(torch.int8) if name == "int8" else scaled.clamp_(-448.0, 448.0).to(E4M3)
    dtype = WIRE_DTYPES[name]
    return torch.cat([scales.view(dtype), *_without_padding(codes.view(dtype), runs)], dim=1)


def decode(messages: Tensor, sizes: Sizes, name: str) -> Tensor:
    """The values [rows, count] of `messages`, in float32; `sizes` as they were encoded. Messages may be filled up."""
    begin, count = scale_bytes(name) * num_blocks(sizes), sum(sizes)
    codes = messages[:, begin : begin + count]
    if name not in CODED:
        return codes.float()
    # a copy: scales of a message among others need not begin at a multiple of four bytes
    own = messages[:, :begin].clone(memory_format=torch.contiguous_format)
    scales = own.view(-1).view(torch.float32).view(len(messages), -1)
    numbers = codes.float() if name == "int8" else codes.contiguous().view(E4M3).float()
    runs = _runs(sizes)
    scaled = (_in_blocks(numbers, runs) * scales.unsqueeze(2)).view(len(messages), -1)
    parts = _without_padding(scaled, runs)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@cache
def _runs(sizes: Sizes) -> Sizes:
    """Sizes of the runs of parameters that need no padding in between: of large models often a single one."""
    runs = [0]
    for size in sizes:
        if runs[-1] % BLOCK:
            runs.append(0)
        runs[-1] += size
    return tuple(runs)


def _in_blocks(values: Tensor, runs: Sizes) -> Tensor:
    """[rows, blocks, 256], the last block of each run filled up with zeros."""
    parts = [
        F.pad(part, (0, -size % BLOCK)) if size % BLOCK else part
        for size, part in zip(runs, torch.split(values, list(runs), dim=1), strict=True)
    ]
    filled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return filled.reshape(len(values), -1, BLOCK)


def _without_padding(filled: Tensor, runs: Sizes) -> list[Tensor]:
    """The runs of rows whose blocks were filled up."""
    parts = torch.split(filled, [size + -size % BLOCK for size in runs], dim=1)
    return [part[:, :size] for size, part in zip(runs, parts, strict=True)]
