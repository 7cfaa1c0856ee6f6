"""Parameter tensors of one block on a rank, and those whose gradients are summed over tp, for every plan.

| tensor                      | tensor parallelism (1-D)                         | gradients summed over tp    |
| --------------------------- | ------------------------------------------------ | --------------------------- |
| column linear, its bias     | outputs / tp; at least one key-value head        | of repeated key-value heads |
| row linear                  | inputs / tp, bias replicated                     | bias with sequence parallel |
| norm over sharded features  | sharded alike                                    | of repeated key-value heads |
| inside a region             | replicated: norms per head, latent projections   | always                      |
| elsewhere in a block        | replicated: norms, routers                       | with sequence parallel      |
| experts, folded ep          | full: ep divides their number over tp too        | never                       |

A region lies between the column and the row linears of attention, of an MLP or of experts. Inside, ranks compute with
their own heads or columns, so each has a partial gradient of a replicated tensor; with sequence parallel ranks have
their own tokens, so gradients of all replicated tensors are partial. ZeRO then shards dimension 0, or the second one of
experts [experts, ..., ...] if only that divides evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.core.model_shape import AttentionShape, BlockShape, ExtraShape, LinearShape, NormShape
from weft.plan.columns import Bools, Columns, Floats, Ints

Home = Literal["sharded", "inside", "outside", "frozen"]  # inside, outside a region: replicated; frozen: no gradient
_KEY_VALUE = ("k_proj", "v_proj", "key", "value", "project_k", "project_v", "Wk", "Wv")


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """`copies` tensor ranks hold the same rows, starting at row `begin`."""

    copies: Floats
    begin: Floats


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """`tensors` equal tensors of `rows` x `row_size` on a tensor rank, sharded by rows over `shards`.

    `inner`: the size of the second of three dimensions, which is sharded if it divides evenly and rows do not.
    """

    rows: Floats
    row_size: Floats
    shards: Ints
    tensors: float = 1
    place: Home = "outside"
    repeats: Repeats | None = None
    inner: Floats | None = None
    is_divided: Bools | bool = False  # over tensor ranks, by expert parallelism: whatever its place without it

    @property
    def is_inner_sharded(self) -> Bools:
        if self.inner is None:
            return np.zeros(len(self.rows), dtype=bool)
        return np.asarray((self.rows % self.shards != 0) & (self.inner % self.shards == 0), dtype=bool)

    @property
    def unsharded(self) -> Floats:
        return self.rows * self.row_size

    @property
    def shard(self) -> Floats:
        """Elements of the first rank's shard."""
        by_rows = np.ceil(self.rows / self.shards) * self.row_size
        return np.where(self.is_inner_sharded, self.unsharded / self.shards, by_rows)

    @property
    def repeated_shard(self) -> Floats:
        """Elements of the first rank's shard that other tensor ranks hold too."""
        if self.repeats is None:
            return np.zeros(len(self.rows))
        rows = np.maximum(np.ceil(self.rows / self.shards) - self.repeats.begin, 0.0)
        return np.asarray(rows * self.row_size * (self.repeats.copies > 1), dtype=np.float64)


def tensors_of(block: BlockShape, columns: Columns) -> Iterator[HeldTensor]:
    """All parameters of one block."""
    for linear in block.linears:
        home = is_inside(linear.name, block)
        yield from linear_tensors(linear, columns, attention=block.attention, is_inside=home)
    for norm in block.norms:
        yield _norm_tensor(norm, block, columns)
    for extra in block.extras:
        yield extra_tensor(extra, columns, is_inside=is_inside(extra.name, block))


def trained_tensors_of(block: BlockShape, columns: Columns, *, is_adapted: bool) -> Iterator[HeldTensor]:
    """The parameters of one block that have gradients. Frozen neighbours tell where a region is."""
    if not is_adapted:
        yield from tensors_of(block, columns)
        return
    for linear in block.trained.linears:
        home = is_inside(linear.name, block)
        yield from linear_tensors(linear, columns, attention=block.attention, is_inside=home)
    for norm in block.trained.norms:
        yield _norm_tensor(norm, block, columns)
    for extra in block.trained.extras:
        yield extra_tensor(extra, columns, is_inside=is_inside(extra.name, block))


def linear_tensors(
    linear: LinearShape, columns: Columns, *, attention: AttentionShape | None = None, is_inside: bool = False
) -> Iterator[HeldTensor]:
    """Weight and bias of a linear; all experts together. `is_inside`: its module holds a region."""
    place = _place(linear, is_inside)
    if linear.role == "expert":
        yield from _expert_tensors(linear, columns, place)
        return
    ones = np.ones(len(columns))
    out, repeats = _outputs(linear, columns, attention)
    into = linear.in_features / np.where(
        columns.is_grid, columns.tensor_side, columns.tp if linear.style == "row" else ones
    )
    if linear.style == "replicated":
        into = ones * linear.in_features
    # a rank of a cube stores 1 / side of its line's block
    stored = out / np.where(columns.is_cube & (linear.style != "replicated"), columns.tensor_side, 1.0)
    rows, row_size = (into, stored) if linear.is_transposed else (stored, into)
    yield HeldTensor(rows=rows * linear.copies, row_size=row_size, shards=columns.shards, place=place, repeats=repeats)
    if linear.bias:
        # the bias of a row linear is added after the sum
        home: Home = "outside" if linear.style == "row" else place
        yield HeldTensor(rows=out * linear.copies, row_size=ones, shards=columns.shards, place=home, repeats=repeats)


def _expert_tensors(linear: LinearShape, columns: Columns, place: Home) -> Iterator[HeldTensor]:
    """Weights [experts, …, …] and biases [experts, …] of fused experts."""
    divisor = columns.expert_tp if linear.style != "replicated" else np.ones_like(columns.expert_tp)
    rows, shards = np.ceil(linear.copies / columns.ep), columns.expert_shards
    matrix = np.ceil(linear.out_features * linear.in_features / divisor)
    inner, inner_style = (linear.in_features, "row") if linear.is_transposed else (linear.out_features, "column")
    held = np.ceil(inner / np.where(linear.style == inner_style, divisor, 1))
    is_divided = columns.folds_experts
    yield HeldTensor(rows=rows, row_size=matrix, shards=shards, place=place, inner=held, is_divided=is_divided)
    if linear.bias:
        bias = np.ceil(linear.out_features / divisor)
        yield HeldTensor(rows=rows, row_size=bias, shards=shards, place=place, is_divided=is_divided)


def _place(linear: LinearShape, is_inside: bool) -> Home:
    if linear.style != "replicated":
        return "sharded"
    is_latent = is_inside and linear.role == "attention"
    return "inside" if is_latent else "outside"


def _outputs(linear: LinearShape, columns: Columns, attention: AttentionShape | None) -> tuple[Floats, Repeats | None]:
    """(outputs on a rank, those that other tensor ranks hold too)."""
    if linear.style != "column":
        side = columns.tensor_side if linear.style == "row" else 1.0
        return np.full(len(columns), float(linear.out_features)) / side, None
    divisor = np.where(columns.is_grid, columns.tensor_side, columns.tp)
    heads = attention.num_kv_heads if attention is not None and not attention.is_latent else 0
    if heads and is_key_value(linear):
        held = np.minimum(divisor, heads)
        return np.ceil(linear.out_features / held), Repeats(copies=divisor / held, begin=np.zeros(len(columns)))
    if heads and attention is not None and is_fused(linear, attention):
        held = np.minimum(divisor, heads)
        query = np.ceil(attention.num_heads * attention.head_dim / divisor)
        rest = np.ceil((linear.out_features - attention.num_heads * attention.head_dim) / held)
        return query + rest, Repeats(copies=divisor / held, begin=query)
    return np.ceil(linear.out_features / divisor), None


def is_key_value(linear: LinearShape) -> bool:
    """Whether a linear projects to keys or values alone, not fused with queries."""
    return linear.role == "attention" and linear.name.rpartition(".")[2] in _KEY_VALUE


def is_fused(linear: LinearShape, attention: AttentionShape) -> bool:
    """Whether one matrix projects to queries, keys and values."""
    per_head = attention.head_dim + attention.value_dim
    width = attention.num_heads * attention.head_dim + attention.num_kv_heads * per_head
    return linear.role == "attention" and linear.style == "column" and linear.out_features == width


def _norm_tensor(norm: NormShape, block: BlockShape, columns: Columns) -> HeldTensor:
    """Weights of a norm: of one head, of all heads at once (sharded), per head (sharded), or of the stream."""
    ones = np.ones(len(columns))
    tensors = max(1, norm.num_parameters // norm.size)  # a weight, or a weight and a bias
    rows = np.full(len(columns), norm.num_parameters / tensors)
    if not is_inside(norm.name, block) or norm.place == "residual":
        rows = rows / columns.tensor_side
        return HeldTensor(rows=rows, row_size=ones, shards=columns.shards, tensors=tensors)
    own_weights = norm.per > 1 and tensors >= norm.per
    if not own_weights and not is_wide(norm, block):
        return HeldTensor(rows=rows, row_size=ones, shards=columns.shards, tensors=tensors, place="inside")
    heads = block.attention.num_kv_heads if block.attention is not None and norm.place == "key" else np.inf
    ranks = np.where(columns.is_grid, columns.tensor_side, columns.tp)
    divisor = np.minimum(ranks, heads)
    repeats = Repeats(copies=ranks / divisor, begin=np.zeros(len(columns))) if norm.place == "key" else None
    if own_weights:  # one tensor [heads, head_dim]
        return HeldTensor(
            rows=norm.per / divisor, row_size=ones * norm.size, shards=columns.shards, tensors=tensors / norm.per,
            place="sharded", repeats=repeats,
        )  # fmt: skip
    return HeldTensor(
        rows=np.ceil(rows / divisor),
        row_size=ones,
        shards=columns.shards,
        tensors=tensors,
        place="sharded",
        repeats=repeats,
    )


def extra_tensor(extra: ExtraShape, columns: Columns, *, is_inside: bool = False) -> HeldTensor:
    divisor = columns.tp if extra.style != "replicated" else np.ones_like(columns.tp)
    return HeldTensor(
        rows=np.ceil(extra.num_parameters / (extra.row_size * extra.num_tensors) / divisor),
        row_size=np.full(len(columns), float(extra.row_size)),
        shards=columns.shards,
        tensors=extra.num_tensors,
        place=_extra_place(extra, is_inside),
    )


def _extra_place(extra: ExtraShape, is_inside: bool) -> Home:
    if not extra.is_trained:
        return "frozen"
    return "sharded" if extra.style != "replicated" else "inside" if is_inside else "outside"


def is_inside(name: str, block: BlockShape) -> bool:
    """Whether a parameter is in a module that holds a region."""
    homes = {linear.name.rpartition(".")[0] for linear in block.linears if linear.style != "replicated"}
    return any(home and name.startswith(f"{home}.") for home in homes)


def is_wide(norm: NormShape, block: BlockShape) -> bool:
    """Whether a norm is over sharded features, so that its statistics are reduced over tp."""
    if norm.place == "residual" or norm.per > 1 or not is_inside(norm.name, block):
        return False
    if norm.place in ("query", "key"):
        return block.attention is not None and norm.size > block.attention.head_dim
    rows = [linear for linear in block.linears if linear.style == "row"]
    return any(linear.in_features == norm.size and _are_neighbours(linear.name, norm.name) for linear in rows)


def _are_neighbours(name: str, other: str) -> bool:
    return name.rpartition(".")[0] == other.rpartition(".")[0]
