"""The tensors of one block as a rank holds them, and whose gradients tensor ranks must add up, for every plan.

| tensor                      | tensor parallelism (1-D)                         | gradients summed over tp    |
| --------------------------- | ------------------------------------------------ | --------------------------- |
| column linear, its bias     | outputs / tp; key-value heads at most one by one | of repeated key-value heads |
| row linear                  | inputs / tp, bias whole                          | bias with sequence parallel |
| a norm over what is cut     | cut alike                                        | of repeated key-value heads |
| whole, inside a region      | whole: a norm of a head, latent projections      | always                      |
| whole, elsewhere in a block | whole: norms, routers                            | with sequence parallel      |

A region is what lies between the columns and the row of attention, of an MLP, of experts. Ranks inside one compute with
their own heads or columns, so of a whole tensor there each has a share of the gradient; with sequence parallel every
rank has its own tokens, so of any whole tensor. Sharding (ZeRO) cuts what is left along dimension 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.core.model_shape import AttentionShape, BlockShape, ExtraShape, LinearShape, NormShape
from weft.plan.columns import Columns, Floats, Ints

Home = Literal["cut", "inside", "outside", "frozen"]  # cut, whole inside a region, whole elsewhere, without gradients
_KEY_VALUE = ("k_proj", "v_proj", "key", "value", "project_k", "project_v", "Wk", "Wv")


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """`copies` tensor ranks hold the same rows, from row `begin` on."""

    copies: Floats
    begin: Floats


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """`tensors` alike of `rows` x `row_size` on a tensor rank, then sharded by rows."""

    rows: Floats
    row_size: Floats
    shards: Ints
    tensors: float = 1
    place: Home = "outside"
    repeats: Repeats | None = None

    @property
    def whole(self) -> Floats:
        return self.rows * self.row_size

    @property
    def shard(self) -> Floats:
        """The first rank's."""
        return np.asarray(np.ceil(self.rows / self.shards) * self.row_size, dtype=np.float64)

    @property
    def repeated_shard(self) -> Floats:
        """What of the first rank's shard neighbours on the tensor axis hold too."""
        if self.repeats is None:
            return np.zeros(len(self.rows))
        rows = np.maximum(np.ceil(self.rows / self.shards) - self.repeats.begin, 0.0)
        return np.asarray(rows * self.row_size * (self.repeats.copies > 1), dtype=np.float64)


def tensors_of(block: BlockShape, columns: Columns) -> Iterator[HeldTensor]:
    """All parameters of one block of this kind."""
    for linear in block.linears:
        home = is_inside(linear.name, block)
        yield from linear_tensors(linear, columns, attention=block.attention, is_inside=home)
    for norm in block.norms:
        yield _norm_tensor(norm, block, columns)
    for extra in block.extras:
        yield extra_tensor(extra, columns, is_inside=is_inside(extra.name, block))


def linear_tensors(
    linear: LinearShape, columns: Columns, *, attention: AttentionShape | None = None, is_inside: bool = False
) -> Iterator[HeldTensor]:
    """Its matrix and its bias; experts together. `is_inside`: in a module that holds a region."""
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
    # a cube's rank stores a part of its line's block
    stored = out / np.where(columns.is_cube & (linear.style != "replicated"), columns.tensor_side, 1.0)
    rows, row_size = (into, stored) if linear.is_transposed else (stored, into)
    yield HeldTensor(rows=rows * linear.copies, row_size=row_size, shards=columns.shards, place=place, repeats=repeats)
    if linear.bias:
        # a row's bias is added after the sum
        home: Home = "outside" if linear.style == "row" else place
        yield HeldTensor(rows=out * linear.copies, row_size=ones, shards=columns.shards, place=home, repeats=repeats)


def _expert_tensors(linear: LinearShape, columns: Columns, place: Home) -> Iterator[HeldTensor]:
    """Fused experts are one tensor [experts, …], and one of biases: sharding cuts the experts, not their rows."""
    cut = columns.expert_tp if linear.style != "replicated" else np.ones_like(columns.expert_tp)
    rows, shards = np.ceil(linear.copies / columns.ep), columns.expert_shards
    for size in (linear.out_features * linear.in_features, linear.out_features * int(linear.bias)):
        if size:
            yield HeldTensor(rows=rows, row_size=np.ceil(size / cut), shards=shards, place=place)


def _place(linear: LinearShape, is_inside: bool) -> Home:
    if linear.style != "replicated":
        return "cut"
    is_latent = is_inside and linear.role == "attention"
    return "inside" if is_latent else "outside"


def _outputs(linear: LinearShape, columns: Columns, attention: AttentionShape | None) -> tuple[Floats, Repeats | None]:
    """(outputs on a rank, which of them neighbours hold too)."""
    if linear.style != "column":
        side = columns.tensor_side if linear.style == "row" else 1.0
        return np.full(len(columns), float(linear.out_features)) / side, None
    cut = np.where(columns.is_grid, columns.tensor_side, columns.tp)
    heads = attention.num_kv_heads if attention is not None and not attention.is_latent else 0
    if heads and is_key_value(linear):
        held = np.minimum(cut, heads)
        return np.ceil(linear.out_features / held), Repeats(copies=cut / held, begin=np.zeros(len(columns)))
    if heads and attention is not None and is_fused(linear, attention):
        held = np.minimum(cut, heads)
        query = np.ceil(attention.num_heads * attention.head_dim / cut)
        rest = np.ceil((linear.out_features - attention.num_heads * attention.head_dim) / held)
        return query + rest, Repeats(copies=cut / held, begin=query)
    return np.ceil(linear.out_features / cut), None


def is_key_value(linear: LinearShape) -> bool:
    """A projection to keys or values of its own, not one fused with the queries'."""
    return linear.role == "attention" and linear.name.rpartition(".")[2] in _KEY_VALUE


def is_fused(linear: LinearShape, attention: AttentionShape) -> bool:
    """One matrix for queries, keys and values."""
    a_key = attention.head_dim + attention.value_dim
    width = attention.num_heads * attention.head_dim + attention.num_kv_heads * a_key
    return linear.role == "attention" and linear.style == "column" and linear.out_features == width


def _norm_tensor(norm: NormShape, block: BlockShape, columns: Columns) -> HeldTensor:
    """Over a head, over all heads at once (cut), with weights of its own for every head (cut), or of the stream."""
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
    cut = np.minimum(ranks, heads)
    repeats = Repeats(copies=ranks / cut, begin=np.zeros(len(columns))) if norm.place == "key" else None
    if own_weights:  # one tensor [heads, head_dim]
        return HeldTensor(
            rows=norm.per / cut, row_size=ones * norm.size, shards=columns.shards, tensors=tensors / norm.per,
            place="cut", repeats=repeats,
        )  # fmt: skip
    return HeldTensor(
        rows=np.ceil(rows / cut), row_size=ones, shards=columns.shards, tensors=tensors, place="cut", repeats=repeats
    )


def extra_tensor(extra: ExtraShape, columns: Columns, *, is_inside: bool = False) -> HeldTensor:
    cut = columns.tp if extra.style != "replicated" else np.ones_like(columns.tp)
    return HeldTensor(
        rows=np.ceil(extra.num_parameters / (extra.row_size * extra.num_tensors) / cut),
        row_size=np.full(len(columns), float(extra.row_size)),
        shards=columns.shards,
        tensors=extra.num_tensors,
        place=_extra_place(extra, is_inside),
    )


def _extra_place(extra: ExtraShape, is_inside: bool) -> Home:
    if not extra.is_trained:
        return "frozen"
    return "cut" if extra.style != "replicated" else "inside" if is_inside else "outside"


def is_inside(name: str, block: BlockShape) -> bool:
    """Whether a parameter lies in a module that holds a region."""
    homes = {linear.name.rpartition(".")[0] for linear in block.linears if linear.style != "replicated"}
    return any(home and name.startswith(f"{home}.") for home in homes)


def is_wide(norm: NormShape, block: BlockShape) -> bool:
    """A norm over features that are cut: its statistics span the tensor ranks."""
    if norm.place == "residual" or norm.per > 1 or not is_inside(norm.name, block):
        return False
    if norm.place in ("query", "key"):
        return block.attention is not None and norm.size > block.attention.head_dim
    rows = [linear for linear in block.linears if linear.style == "row"]
    return any(linear.in_features == norm.size and _are_neighbours(linear.name, norm.name) for linear in rows)


def _are_neighbours(name: str, other: str) -> bool:
    return name.rpartition(".")[0] == other.rpartition(".")[0]
