"""How many parameter elements a rank holds, whole and sharded, for every plan.

A matrix [out, in] cut by tensor parallelism loses a factor of its divisor; sharding then cuts dimension 0, as
`fully_shard` does, so the first rank holds ceil(rows / shards) rows: uneven shards are counted as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import BlockShape, ExtraShape, LinearShape, ModelShape
from weft.plan.columns import Columns, Floats, Ints
from weft.plan.stages import Stage


@dataclass(frozen=True)
class Elements:
    """Elements of a unit on a rank: before sharding, the first rank's shard, and what travels when it is gathered."""

    whole: Floats
    shard: Floats
    padded: Floats  # shards x shard: the gathered unit with its padding

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.whole + other.whole, self.shard + other.shard, self.padded + other.padded)

    def times(self, count: Floats | int) -> Elements:
        return Elements(self.whole * count, self.shard * count, self.padded * count)


@dataclass(frozen=True)
class Share:
    """A rank's part of the model."""

    blocks: tuple[Elements, ...]  # one block of each kind
    root: Elements  # embedding, head and what else is outside blocks
    total: Elements
    largest_block: Floats  # whole elements of the largest block the rank holds
    largest_padded: Floats


def share_of(shape: ModelShape, columns: Columns, stage: Stage) -> Share:
    """The parameters of the rank that `stage` describes."""
    blocks = tuple(block_elements(kind, columns) for kind in shape.kinds)
    root = root_elements(shape, columns, stage)
    total = root
    largest, padded = np.zeros(len(columns)), np.zeros(len(columns))
    for index, block in enumerate(blocks):
        count = stage.blocks[:, index]
        total = total + block.times(count)
        largest = np.maximum(largest, np.where(count > 0, block.whole, 0.0))
        padded = np.maximum(padded, np.where(count > 0, block.padded, 0.0))
    return Share(blocks, root, total, largest, padded)


def block_elements(block: BlockShape, columns: Columns) -> Elements:
    """One block of this kind."""
    heads = block.attention.num_kv_heads if block.attention and not block.attention.is_latent else 0
    parts = [linear_elements(linear, columns, heads=heads if is_key_value(linear) else 0) for linear in block.linears]
    for norm in block.norms:
        tensors = max(1, norm.num_parameters // norm.size)  # a weight, or a weight and a bias
        rows = np.full(len(columns), norm.num_parameters / tensors)
        parts.append(_sharded(rows, np.ones(len(columns)), columns.shards).times(tensors))
    for extra in block.extras:
        cut = columns.tp if extra.style != "replicated" else np.ones_like(columns.tp)
        parts.append(_extra_elements(extra, columns, cut=cut))
    return _sum(parts, len(columns))


def _extra_elements(extra: ExtraShape, columns: Columns, *, cut: Ints) -> Elements:
    rows = np.ceil(extra.num_parameters / (extra.row_size * extra.num_tensors) / cut)
    width = np.full(len(columns), float(extra.row_size))
    return _sharded(rows, width, columns.shards).times(extra.num_tensors)


def linear_elements(linear: LinearShape, columns: Columns, *, heads: int = 0) -> Elements:
    """One linear, experts together; biases count with the rows they belong to.

    `heads` is how many pieces it can be cut into: beyond them, tensor ranks hold the same key-value heads.
    """
    if linear.role == "expert":
        width = np.ceil(linear.out_features * (linear.in_features + int(linear.bias)) / columns.expert_tp)
        # fused experts are one tensor [experts, …]: sharding cuts the experts, not their rows
        return _sharded(np.ceil(linear.copies / columns.ep), width, columns.expert_shards)
    cut = np.minimum(columns.matrix_divisor, heads) if heads else columns.matrix_divisor
    out = np.ceil(linear.out_features / (cut if linear.style == "column" else np.ones(len(columns))))
    into = linear.in_features / (cut if linear.style == "row" else np.ones(len(columns)))
    rows, row_size = (np.ceil(into), out) if linear.is_transposed else (out, into)
    matrix = _sharded(rows * linear.copies, row_size, columns.shards)
    if not linear.bias:
        return matrix
    return matrix + _sharded(out * linear.copies, np.ones(len(columns)), columns.shards)


def is_key_value(linear: LinearShape) -> bool:
    """A projection to keys or values of its own, not one fused with the queries'."""
    return linear.role == "attention" and linear.name.rpartition(".")[2] in ("k_proj", "v_proj", "key", "value")


def root_elements(shape: ModelShape, columns: Columns, stage: Stage) -> Elements:
    """Embedding on the first stage, head and final norm on the last; a tied head on another stage is a second copy."""
    size = len(columns)
    width = np.full(size, float(shape.embedding_size or shape.hidden_size))
    rows = np.ceil(shape.vocab_size / columns.matrix_divisor)
    table = _sharded(rows, width, columns.shards)
    root = table.times(stage.holds_embedding.astype(float))
    own_head = stage.holds_head & (~stage.holds_embedding if shape.tied_head else np.ones(size, dtype=bool))
    root = root + table.times(own_head.astype(float))
    if shape.head_bias:
        root = root + _sharded(rows, np.ones(size), columns.shards).times(stage.holds_head.astype(float))
    rest = _sum([_extra_elements(extra, columns, cut=np.ones_like(columns.tp)) for extra in shape.outside], size)
    return root + rest.times((stage.holds_embedding | stage.holds_head).astype(float))


def _sharded(rows: Floats, row_size: Floats, shards: Floats | Ints) -> Elements:
    share = np.ceil(rows / shards) * row_size
    return Elements(rows * row_size, share, share * shards)


def _sum(parts: list[Elements], size: int) -> Elements:
    total = Elements(np.zeros(size), np.zeros(size), np.zeros(size))
    for part in parts:
        total = total + part
    return total
