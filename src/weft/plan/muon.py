"""Muon's costs, for every plan: states, exchanges of matrices, their memory and the time of Newton-Schulz.

    states       4 bytes per element of a matrix, 8 of all other parameters (float32)
    exchange     per round one matrix per rank: blocks to the owners and back; none for matrices that no axis shards
    time         owned matrices x FLOPs of five steps; each rank repeats those that it holds in full

Which matrix is whose follows from `core/muon.py`, as in the engine. Bytes are the first rank's, with even shards of
tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import BlockShape, LinearShape
from weft.core.muon import AXIS, newton_schulz_flops, order_key, orthogonal_dtype
from weft.plan.axis import TrafficRow
from weft.plan.columns import Bools, Floats
from weft.plan.memory.block_tensors import linear_tensors
from weft.plan.request import DTYPE_BYTES
from weft.plan.time.links import link_of
from weft.plan.view import View

PEAK_SHARE = 0.4  # of the device's rate: products of square matrices, and reads in between. Not measured on a GPU yet
_COPIES = 4  # of a matrix during its update, beside the float32 blocks and three products of its short side


@dataclass(frozen=True)
class MatrixKind:
    """Equal matrices of a rank's blocks."""

    rows: int
    columns: int
    count: Floats  # in the blocks of this rank's stages, on all ranks that share them
    held: Floats  # of them, in full on a rank that repeats their update
    piece: Floats  # elements of the first rank's block of one
    returned: Floats  # elements that its owner returns, to all ranks
    is_shared: Bools
    owned_elements: Floats  # elements of all of them that the first rank stores


def is_matrix(linear: LinearShape) -> bool:
    return linear.role != "router"


def matrix_kinds(view: View) -> list[MatrixKind]:
    """In the order of rounds."""
    found = [
        _kind(view, index, block, linear)
        for index, block in enumerate(view.shape.kinds)
        for linear in block.linears
        if is_matrix(linear)
    ]
    return sorted(found, key=lambda kind: order_key(kind.rows, kind.columns))


def _kind(view: View, index: int, block: BlockShape, linear: LinearShape) -> MatrixKind:
    columns, blocks = view.columns, view.stage.blocks[:, index]
    is_expert = linear.role == "expert" and block.moe is not None
    held = next(linear_tensors(linear, columns, attention=block.attention))
    rows, width = linear.out_features, linear.in_features
    if linear.is_transposed:
        rows, width = width, rows
    is_zero, size = columns.zero > 0, float(rows * width)
    stored = np.where(is_zero, held.shard, held.unsharded)
    if is_expert:
        part = np.where(is_zero & held.is_inner_sharded, held.row_size / held.shards, held.row_size)
        whole_rank = np.where(is_zero & ~held.is_inner_sharded, np.ceil(held.rows / held.shards), held.rows)
        piece, returned = part, np.full(len(columns), size)
        held_here = blocks * whole_rank
    else:
        piece, returned = stored / linear.copies, held.unsharded / linear.copies * columns.tp
        held_here = blocks * linear.copies
    is_shared = piece < size
    return MatrixKind(
        rows=rows,
        columns=width,
        count=blocks * linear.copies,
        held=held_here,
        piece=piece,
        returned=returned,
        is_shared=is_shared,
        owned_elements=blocks * stored,
    )


def matrix_elements(view: View) -> Floats:
    """Elements of matrices that the rank stores a momentum of."""
    return sum((kind.owned_elements for kind in matrix_kinds(view)), start=np.zeros(len(view.columns)))


def traffic(view: View) -> Iterator[TrafficRow]:
    """The exchanges of a step."""
    if view.request.workload.optimizer != "muon":
        return
    _, elements, count = _rounds(view)
    yield TrafficRow(AXIS, "all_to_all", "update", elements * _element_bytes(view), count)


def update_seconds(view: View) -> Floats:
    """Seconds of exchanges and of Newton-Schulz on one rank; 0 for other optimizers."""
    if view.request.workload.optimizer != "muon":
        return np.zeros(len(view.columns))
    owned, elements, count = _rounds(view)
    dtype = orthogonal_dtype(view.request.workload.muon_precision, is_cpu=view.request.is_cpu)
    peaks = view.request.cluster.device.peak_flops
    link = link_of(view.request.cluster, view.columns, AXIS)
    computed = owned / (PEAK_SHARE * (peaks.get(dtype) or max(peaks.values())))
    return computed + link.seconds(elements * _element_bytes(view), num_calls=count)


def update_temporaries(view: View) -> Floats:
    """Bytes that the update of the largest matrix needs."""
    largest = np.zeros(len(view.columns))
    for kind in matrix_kinds(view):
        size, short = kind.rows * kind.columns, min(kind.rows, kind.columns)
        needed = 4 * size + _element_bytes(view) * (_COPIES * size + 3 * short**2)
        largest = np.maximum(largest, np.where(kind.count > 0, needed, 0.0))
    return largest


def _rounds(view: View) -> tuple[Floats, Floats, Floats]:
    """(FLOPs of the first rank, elements that it sends, collectives)."""
    columns = view.columns
    num_ranks = (np.where(columns.zero > 0, columns.shards, 1) * columns.tp).astype(np.float64)
    flops, sent, begin = (np.zeros(len(columns)) for _ in range(3))
    for kind in matrix_kinds(view):
        shared = np.where(kind.is_shared, kind.count, 0.0)
        owned = np.ceil((begin + shared) / num_ranks) - np.ceil(begin / num_ranks)
        sent = sent + (shared - owned) * kind.piece + owned * (kind.returned - kind.piece)
        computed = np.where(kind.is_shared, owned, kind.held)
        flops = flops + computed * float(newton_schulz_flops(kind.rows, kind.columns))
        begin = begin + shared
    return flops, sent, 2 * np.ceil(begin / num_ranks)


def _element_bytes(view: View) -> int:
    workload = view.request.workload
    return DTYPE_BYTES[orthogonal_dtype(workload.muon_precision, is_cpu=view.request.is_cpu)]
