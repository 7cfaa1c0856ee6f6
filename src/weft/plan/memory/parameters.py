"""Number of parameter elements per rank, unsharded and sharded, for every plan.

Tensor parallelism shards matrices (block_tensors.py) and rows of the vocabulary; ZeRO then shards dimension 0 as
`fully_shard` does: the first rank holds ceil(rows / shards) rows, so uneven shards are counted exactly. Experts that do
not divide are sharded along their second dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import BlockShape, LinearShape, ModelShape
from weft.core.wire_bytes import BLOCK
from weft.plan.columns import Columns, Floats, Ints
from weft.plan.memory.block_tensors import HeldTensor, extra_tensor, linear_tensors, tensors_of
from weft.plan.pp.stages import Stage


@dataclass(frozen=True)
class Elements:
    """Elements of an FSDP unit on a rank: unsharded, the first rank's shard, and all-gathered with padding."""

    unsharded: Floats
    shard: Floats
    padded: Floats  # shards x shard
    inner: Floats  # of tensors sharded along an inner dimension: `fully_shard` copies them once more
    code_blocks: Floats  # of the unsharded tensors, where they travel as codes
    shard_code_blocks: Floats

    @staticmethod
    def of(unsharded: Floats, shard: Floats, shards: Floats | Ints, inner: Floats) -> Elements:
        """Elements of one tensor: each begins a block of codes."""
        blocks, shard_blocks = np.ceil(unsharded / BLOCK), np.ceil(shard / BLOCK)
        return Elements(unsharded, shard, shard * shards, inner, blocks, shard_blocks)

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.unsharded + other.unsharded,
            self.shard + other.shard,
            self.padded + other.padded,
            self.inner + other.inner,
            self.code_blocks + other.code_blocks,
            self.shard_code_blocks + other.shard_code_blocks,
        )

    def times(self, count: Floats | float) -> Elements:
        return Elements(
            self.unsharded * count,
            self.shard * count,
            self.padded * count,
            self.inner * count,
            self.code_blocks * count,
            self.shard_code_blocks * count,
        )


@dataclass(frozen=True)
class Share:
    """The part of the model on a rank."""

    blocks: tuple[Elements, ...]  # one block of each kind
    root: Elements  # embedding, head and all else outside blocks
    total: Elements
    largest_block: Floats  # unsharded elements of the largest block on the rank
    largest_padded: Floats
    largest_inner: Floats
    experts: Elements  # of `total`: those that are units of their own, in expert parallelism


def share_of(shape: ModelShape, columns: Columns, stage: Stage) -> Share:
    """The parameters of the rank that `stage` describes."""
    blocks = tuple(block_elements(kind, columns) for kind in shape.kinds)
    root = root_elements(shape, columns, stage)
    total, experts = root, _sum([], len(columns))
    largest, padded, inner = (np.zeros(len(columns)) for _ in range(3))
    for index, block in enumerate(blocks):
        count = stage.blocks[:, index]
        total = total + block.times(count)
        experts = experts + expert_elements(shape.kinds[index], columns).times(count * (columns.ep > 1))
        largest = np.maximum(largest, np.where(count > 0, block.unsharded, 0.0))
        padded = np.maximum(padded, np.where(count > 0, block.padded, 0.0))
        inner = np.maximum(inner, np.where(count > 0, block.inner, 0.0))
    return Share(blocks, root, total, largest, padded, inner, experts)


def block_elements(block: BlockShape, columns: Columns) -> Elements:
    """Elements of one block."""
    return _sum([elements_of(held) for held in tensors_of(block, columns)], len(columns))


def expert_elements(block: BlockShape, columns: Columns) -> Elements:
    """Elements of the experts of one block."""
    return _sum([linear_elements(linear, columns) for linear in _expert_linears(block)], len(columns))


def num_expert_tensors(block: BlockShape) -> int:
    """Parameters of the experts of one block, which are fused: weights and biases."""
    return sum(1 + linear.bias for linear in _expert_linears(block))


def _expert_linears(block: BlockShape) -> list[LinearShape]:
    return [linear for linear in block.linears if linear.role == "expert"] if block.moe is not None else []


def linear_elements(linear: LinearShape, columns: Columns) -> Elements:
    """Elements of one linear and its bias."""
    return _sum([elements_of(held) for held in linear_tensors(linear, columns)], len(columns))


def elements_of(held: HeldTensor) -> Elements:
    inner = np.where(held.is_inner_sharded, held.unsharded, 0.0)
    return Elements.of(held.unsharded, held.shard, held.shards, inner).times(held.tensors)


def root_elements(shape: ModelShape, columns: Columns, stage: Stage) -> Elements:
    """Embedding on the first stage, head and final norm on the last; a tied head on its own stage is a second copy."""
    size = len(columns)
    width = _table_width(shape, columns)
    head_rows = _table_rows(shape.num_logits, columns, is_sharded=shape.has_sharded_head)
    root = table_elements(shape, columns).times(stage.holds_embedding.astype(float))
    own_head = stage.holds_head & (~stage.holds_embedding if shape.tied_head else np.ones(size, dtype=bool))
    root = root + _sharded(head_rows, width, columns.shards).times(own_head.astype(float))
    if shape.head_bias:
        root = root + _sharded(head_rows, np.ones(size), columns.shards).times(stage.holds_head.astype(float))
    # final norms and position tables: a grid shards their hidden size
    for extra in shape.outside:
        is_here = stage.holds_embedding if extra.is_before_blocks else stage.holds_head
        root = root + elements_of(extra_tensor(extra, columns)).times(is_here / columns.tensor_side)
    return root


def table_elements(shape: ModelShape, columns: Columns) -> Elements:
    """Elements of the token table."""
    rows = _table_rows(shape.vocab_size, columns, is_sharded=shape.has_sharded_table)
    return _sharded(rows, _table_width(shape, columns), columns.shards)


def _table_width(shape: ModelShape, columns: Columns) -> Floats:
    return np.asarray((shape.embedding_size or shape.hidden_size) / columns.tensor_side, dtype=np.float64)


def _table_rows(num_rows: int, columns: Columns, *, is_sharded: bool) -> Floats:
    grid = np.where(columns.is_grid, columns.tensor_side, columns.tp)
    chunks = np.where(columns.is_cube, columns.tensor_side**2, grid)
    return np.asarray(np.ceil(num_rows / np.where(is_sharded, chunks, 1)), dtype=np.float64)


def _sharded(rows: Floats, row_size: Floats, shards: Floats | Ints) -> Elements:
    share = np.ceil(rows / shards) * row_size
    return Elements.of(rows * row_size, share, shards, np.zeros(len(rows)))


def _sum(parts: list[Elements], size: int) -> Elements:
    total = Elements(*(np.zeros(size) for _ in range(6)))
    for part in parts:
        total = total + part
    return total
