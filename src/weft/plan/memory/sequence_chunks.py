"""MLPs in chunks of positions (`activations.sequence_chunk`), for every plan: what blocks save less, what a chunk has.

    gated MLP   4 widths per token are not saved: gate, act(gate), up, their product
    others      2 widths: the input and the result of the activation
    backward    those of one chunk, beside the gradients of the block's matrices, which chunks add up

An activation written out in Python (GPT-2's) saves more, which is not counted here: the estimate is too high then.
Tensor parallelism is refused beside chunks, so widths are whole here.
"""

from __future__ import annotations

import numpy as np

from weft.core.model_shape import BlockShape, SavedBytes
from weft.plan.columns import Bools, Floats
from weft.plan.view import View


def num_chunks(view: View) -> Floats:
    """Chunks of a row's positions on a rank; 1 without chunks."""
    chunk = np.where(view.columns.sequence_chunk > 0, view.columns.sequence_chunk, _positions(view))
    return np.asarray(np.ceil(_positions(view) / chunk), dtype=np.float64)


def is_chunked(view: View) -> Bools:
    return np.asarray(num_chunks(view) > 1, dtype=bool)


def chunk_share(view: View) -> Floats:
    """Share of the positions that one chunk has."""
    shorter = np.minimum(view.columns.sequence_chunk / _positions(view), 1.0)
    return np.where(is_chunked(view), shorter, 1.0)


def inside_mlps(block: BlockShape, *, compute_bytes: int) -> SavedBytes:
    """Saved within the MLP of a block."""
    columns = [linear for linear in block.linears if linear.role == "mlp" and linear.style != "row" and linear.active]
    widths = sum(4.0 if _is_gated(block, linear.in_features) else 2.0 for linear in columns[:1])
    return SavedBytes(split=widths * block.mlp_width * compute_bytes)


def _is_gated(block: BlockShape, hidden_size: int) -> bool:
    """Whether the projections to the width are two, or one of twice the width."""
    into = [linear for linear in block.linears if linear.role == "mlp" and linear.in_features == hidden_size]
    return sum(linear.out_features for linear in into) >= 2 * block.mlp_width


def _positions(view: View) -> Floats:
    """Positions of a row on a rank."""
    rows = view.request.workload.global_batch / (view.columns.dp * view.columns.microbatches)
    return np.asarray(np.ceil(view.tokens / rows), dtype=np.float64)
