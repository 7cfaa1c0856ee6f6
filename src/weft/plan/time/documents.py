"""Attention of rows whose documents do not attend to each other: FLOPs by document, and what a kernel computes of them.

A causal row of documents of n_1, n_2, ... tokens has (n_1^2 + n_2^2 + ...) / 2 pairs of a query and a key: its tokens
times half of `document_length`, the mean length of the document that a token is in. Under a mask torch's kernels
compute every pair of the row, as without a causal mask; a fused kernel of variable lengths computes those of documents.
"""

from __future__ import annotations

import numpy as np

from weft.core.model_shape import BlockShape
from weft.plan.columns import Columns, Floats
from weft.plan.memory.block_activations import mean_keys
from weft.plan.request import Request


def attention_flops_per_token(block: BlockShape, sequence_length: float, *, sees_all_keys: bool = False) -> float:
    attention = block.attention
    if attention is None:
        return 0.0
    keys = float(sequence_length) if sees_all_keys else mean_keys(attention, sequence_length)
    return 2.0 * keys * attention.calls * attention.num_heads * (attention.head_dim + attention.value_dim)


def computed_flops_per_token(request: Request, columns: Columns, block: BlockShape) -> Floats:
    """Of a kernel that does not write scores. Parts of context-parallel ranks are counted as those of whole rows."""
    workload = request.workload
    if workload.attention == "fused" or workload.document_length is None:
        return np.full(len(columns), attention_flops_per_token(block, workload.attended_length))
    whole = attention_flops_per_token(block, workload.sequence_length)
    masked = attention_flops_per_token(block, workload.sequence_length, sees_all_keys=True)
    return np.where(columns.cp > 1, whole, masked)


def documents_note(request: Request) -> str | None:
    """How the documents of rows enter FLOPs and time; None where every row is one document."""
    workload = request.workload
    if workload.document_length is None:
        return None
    share = (workload.attended_length + 1) / (workload.sequence_length + 1)
    counted = (
        f"a token's document has {workload.attended_length:,.0f} of {workload.sequence_length:,} tokens on average: "
        f"attention has {share:.1%} of the pairs of whole rows in FLOPs and MFU"
    )
    if workload.attention == "fused":
        return f"{counted}, and in time: a fused kernel computes no others"
    return (
        f"{counted}; in time every pair of a row, which torch's kernels compute under a mask "
        "(--set model.attention=fused assumes one that does not)"
    )
