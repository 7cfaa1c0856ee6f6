"""The GPU kernel of `cross_entropy`: one program per row, which reads the row for its sum and again for its gradient.

Imported only on machines with a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.engine.objective import IGNORED

if TYPE_CHECKING:
    from weft.engine.kernels.cross_entropy import Cap

BLOCK, WARPS = 4096, 8


def launch(logits: torch.Tensor, labels: torch.Tensor, cap: Cap, *, wants_gradient: bool) -> torch.Tensor:
    if logits.stride(-1) != 1:
        raise ValueError("a row of logits must be contiguous")
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _rows[(logits.shape[0],)](
        logits,
        logits.stride(0),
        labels,
        losses,
        logits.shape[1],
        cap.before,
        cap.after,
        ignored_label=IGNORED,
        is_capped=cap.is_capped,
        wants_gradient=wants_gradient,
        block=BLOCK,
        num_warps=WARPS,
    )
    return losses.sum()


@triton.jit
def _bend(x, before, is_capped: tl.constexpr):  # type: ignore[no-untyped-def]
    """before * x, or its tanh: 2 sigmoid(2u) - 1, which does not overflow."""
    u = x.to(tl.float32) * before
    if is_capped:
        u = 2.0 * tl.sigmoid(2.0 * u) - 1.0
    return u


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits,
    stride,
    labels,
    losses,
    vocab_size,
    before,
    after,
    ignored_label: tl.constexpr,
    is_capped: tl.constexpr,
    wants_gradient: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, block)
    if label == ignored_label:
        tl.store(losses + row, 0.0)
        if wants_gradient:
            for begin in range(0, vocab_size, block):
                inside = begin + columns < vocab_size
                tl.store(at + begin + columns, tl.zeros([block], logits.dtype.element_ty), mask=inside)
        return
    most = -float("inf")
    total = 0.0
    for begin in range(0, vocab_size, block):
        inside = begin + columns < vocab_size
        z = _bend(tl.load(at + begin + columns, mask=inside, other=0.0), before, is_capped) * after
        z = tl.where(inside, z, -float("inf"))
        higher = tl.maximum(most, tl.max(z, axis=0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(z - higher), axis=0)
        most = higher
    log_sum = most + tl.log(total)
    chosen = _bend(tl.load(at + label), before, is_capped) * after
    tl.store(losses + row, log_sum - chosen)
    if wants_gradient:
        tl.debug_barrier()  # every thread has read the label's logit before one of them writes there
        for begin in range(0, vocab_size, block):
            inside = begin + columns < vocab_size
            u = _bend(tl.load(at + begin + columns, mask=inside, other=0.0), before, is_capped)
            gradient = tl.exp(u * after - log_sum) - tl.where(begin + columns == label, 1.0, 0.0)
            slope = before * after
            if is_capped:
                slope = slope * (1.0 - u * u)
            tl.store(at + begin + columns, (gradient * slope).to(logits.dtype.element_ty), mask=inside)
