"""The GPU kernel of `copy_in`: copies a rank's rows of a gradient, cast, to their place in the buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


def copy_rows(gradient: torch.Tensor, rows: torch.Tensor, begin: int, share: int) -> None:
    """rows[r, begin : begin + share] = the r-th share of `gradient`."""
    grid = (triton.cdiv(share, BLOCK), rows.shape[0])
    _copy[grid](gradient, rows, begin, share, rows.stride(0), block=BLOCK, num_warps=WARPS)


@triton.jit
def _copy(gradient, rows, begin, share, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    rank = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < share
    values = tl.load(gradient + rank * share + at, mask=inside)
    tl.store(rows + rank * stride + begin + at, values.to(rows.dtype.element_ty), mask=inside)
