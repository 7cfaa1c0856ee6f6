"""Bytes of optimizer states on a rank, for every plan.

An optimizer that treats all parameters alike has a number of bytes each. Muon has one state of a matrix and two of all
else; Adafactor a mean per row and per column of a matrix, full on every rank, and one state of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import BlockShape, ExtraShape
from weft.plan import muon
from weft.plan.columns import Bools, Floats
from weft.plan.memory.block_tensors import extra_tensor, linear_tensors
from weft.plan.memory.parameters import elements_of, table_elements
from weft.plan.request import DTYPE_BYTES
from weft.plan.view import View


@dataclass(frozen=True)
class Factored:
    """Matrices of a rank, all together: elements that it stores, and rows and columns of the full matrices."""

    elements: Floats
    means: Floats


def state_bytes(view: View, held: Floats) -> Floats:
    """States of `held` parameters."""
    bytes_of_all = np.asarray(held * view.sizes.optimizer, dtype=np.float64)
    size = DTYPE_BYTES[view.request.precision.second_moment]
    if view.shape.is_adapted:  # factors are small: at most as much
        return bytes_of_all
    if view.request.workload.optimizer == "muon":
        return bytes_of_all - size * muon.matrix_elements(view)
    if view.request.workload.optimizer == "adafactor":
        found = factored(view)
        return bytes_of_all - size * (found.elements - found.means)
    return bytes_of_all


def factored(view: View) -> Factored:
    """All matrices and tables of the rank's stages."""
    parts = list(_parts(view))
    zero = np.zeros(len(view.columns))
    return Factored(sum((p.elements for p in parts), start=zero), sum((p.means for p in parts), start=zero))


def num_tensors(view: View) -> Floats:
    """Parameters of the rank's stages."""
    stage, shape = view.stage, view.shape
    of_blocks = stage.blocks @ np.asarray([_tensors_of(kind) for kind in shape.kinds], dtype=np.float64)
    outside = sum(
        (extra.num_tensors * (stage.holds_embedding if extra.is_before_blocks else stage.holds_head) * 1.0)
        for extra in shape.outside
    )
    return np.asarray(of_blocks + outside + _tables(view) + shape.head_bias * stage.holds_head, dtype=np.float64)


def _tensors_of(block: BlockShape) -> int:
    """Experts are stacked: one weight and one bias."""
    linears = sum((1 if one.role == "expert" else one.copies) * (1 + one.bias) for one in block.linears)
    norms = sum(norm.num_parameters // norm.size for norm in block.norms)
    return linears + norms + sum(extra.num_tensors for extra in block.extras)


def _parts(view: View) -> Iterator[Factored]:
    shape, columns = view.shape, view.columns
    is_zero = columns.zero > 0
    for index, block in enumerate(shape.kinds):
        blocks = view.stage.blocks[:, index]
        for linear in block.linears:
            held = next(linear_tensors(linear, columns, attention=block.attention))
            means = linear.copies * (linear.in_features + linear.out_features)
            yield Factored(blocks * np.where(is_zero, held.shard, held.unsharded), blocks * float(means))
        yield from (_times(_of_extra(view, extra), blocks) for extra in block.extras)
    for extra in shape.outside:
        is_here = view.stage.holds_embedding if extra.is_before_blocks else view.stage.holds_head
        yield _times(_of_extra(view, extra), is_here.astype(np.float64))
    table, width = table_elements(shape, columns), shape.embedding_size or shape.hidden_size
    here = Factored(
        np.where(is_zero, table.shard, table.unsharded), np.full(len(columns), shape.vocab_size + width * 1.0)
    )
    yield _times(here, _tables(view))


def _of_extra(view: View, extra: ExtraShape) -> Factored:
    """A table outside of linear layers; vectors are not factored."""
    if extra.row_size == 1 or not extra.is_trained:
        return Factored(np.zeros(len(view.columns)), np.zeros(len(view.columns)))
    held = elements_of(extra_tensor(extra, view.columns))
    rows = extra.num_parameters / extra.num_tensors / extra.row_size
    means = np.full(len(view.columns), extra.num_tensors * (rows + extra.row_size))
    return Factored(np.where(view.columns.zero > 0, held.shard, held.unsharded), means)


def _times(part: Factored, count: Floats) -> Factored:
    return Factored(part.elements * count, part.means * count)


def _tables(view: View) -> Floats:
    """Tables of tokens on the rank: the embedding, and a head of its own, as a tied one is on another stage."""
    stage = view.stage
    if view.shape.has_scores:  # one row is a vector
        return np.asarray(stage.holds_embedding * 1.0, dtype=np.float64)
    has_own_head: Bools = ~stage.holds_embedding if view.shape.tied_head else np.ones(len(view.columns), dtype=bool)
    return np.asarray(stage.holds_embedding * 1.0 + (stage.holds_head & has_own_head), dtype=np.float64)
