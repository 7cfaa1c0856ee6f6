"""`ModelShape`: the sizes of a causal LM by kind of block, without tensors. All costs are derived from it.

`models/shape` derives it from a model; `plan` counts bytes, FLOPs and traffic with it.
Parameters = embeddings + sum over blocks of (linears + norms + extras) + final norms + head (none where tied).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

Style = Literal["column", "row", "replicated"]  # of one-dimensional tensor parallelism


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A matrix [out_features, in_features], `copies` of it in the block; a token uses `active` of them."""

    name: str  # relative to the block: "self_attn.q_proj"
    in_features: int
    out_features: int
    bias: bool = False
    style: Style = "replicated"
    role: Literal["attention", "mlp", "expert", "shared_expert", "router", "other"] = "other"
    copies: int = 1
    active: int = 1
    is_transposed: bool = False  # stored as [in_features, out_features]: ZeRO shards the inputs
    is_trained: bool = True
    code_bytes: float = 0.0  # of each weight of a frozen matrix that rests in codes, with its scales; 0: none

    @property
    def num_parameters(self) -> int:
        return self.copies * (self.in_features * self.out_features + (self.out_features if self.bias else 0))

    @property
    def num_active_parameters(self) -> int:
        return self.num_parameters // self.copies * self.active

    @property
    def flops_per_token(self) -> int:
        """Forward: one multiplication and one addition per weight that a token uses."""
        return 2 * self.active * self.in_features * self.out_features


@dataclass(frozen=True, kw_only=True)
class NormShape:
    """A normalisation over `size` features, for `per` vectors per token (heads, for QK-norm)."""

    name: str
    size: int
    kind: Literal["rms", "layer"] = "rms"
    num_parameters: int = 0
    place: Literal["residual", "query", "key", "other"] = "residual"
    per: int = 1
    is_fused: bool = False  # one kernel of torch, not written out in Python
    is_trained: bool = True


@dataclass(frozen=True, kw_only=True)
class ExtraShape:
    """Any other parameter: a convolution of a state-space block, attention sinks, a position table."""

    name: str
    num_parameters: int
    style: Style = "replicated"
    row_size: int = 1  # elements that ZeRO keeps together: a row of a table
    num_tensors: int = 1  # of equal size, each sharded separately
    is_trained: bool = True
    is_before_blocks: bool = False  # outside the blocks: on the first pipeline stage, not on the last
    is_factor: bool = False  # of a low-rank adapter: a matrix [num_parameters / row_size, row_size] that multiplies


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Softmax attention; state-space and linear-attention blocks have none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values: differs from head_dim in latent attention
    window: int | None = None  # keys per query of a sliding-window layer
    materialises_scores: bool = False  # no fused kernel computes it (soft-capping, sinks, ALiBi)
    is_latent: bool = False  # MLA: keys and values are stored compressed
    latent_dim: int = 0  # cached elements per token of latent attention
    rotary: bool = True
    dropout: float = 0.0
    has_grouped_order: bool = False  # fused [q, k, v] per head group: heads cannot be repeated
    calls: int = 1  # of the attention function in a block's forward: differential attention makes two


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """The experts of a block; their matrices are among its linears with role "expert"."""

    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int = 0
    weighs_in_float32: bool = False  # the router's weights are not cast to the compute dtype
    num_weights: int = 1  # tensors of the router's weights that enter experts and shared experts
    num_choices: int = 1  # the same for the numbers of chosen experts
    saves_after_experts: bool = False  # a tensor after their output: a norm, a scale


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token, by the axes that shard them."""

    stream: float = 0.0  # the residual stream and its norms: sharded by sequence parallel
    gathered: float = 0.0  # inputs of column-parallel linears: replicated over tp
    split: float = 0.0  # inside attention and MLP: sharded over tp
    key_value: float = 0.0  # sharded over tp, at least one key-value head per rank
    scores: float = 0.0  # bytes per key that a query sees: times the sequence, sharded over tp
    routed: float = 0.0  # expert inputs and outputs: of all tokens, with ep of the tokens routed to this rank
    copied: float = 0.0  # only with sequence parallel: a second all-gather of the same input
    unsharded_scores: float = 0.0  # of attention that is not sharded

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            self.stream + other.stream,
            self.gathered + other.gathered,
            self.split + other.split,
            self.key_value + other.key_value,
            self.scores + other.scores,
            self.routed + other.routed,
            self.copied + other.copied,
            self.unsharded_scores + other.unsharded_scores,
        )

    @property
    def unsharded(self) -> SavedBytes:
        """The same tensors of a module that tensor parallelism replicates."""
        return SavedBytes(
            stream=self.stream,
            gathered=self.gathered + self.split + self.key_value,
            routed=self.routed,
            unsharded_scores=self.scores,
        )

    def __sub__(self, other: SavedBytes) -> SavedBytes:
        return self + SavedBytes(*(-getattr(other, field.name) for field in fields(other)))


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """Activations that one block saves for its backward, by a forward on the meta device."""

    compute_bytes: int  # of the compute dtype
    writes_scores: bool  # attention without a fused kernel
    saved: SavedBytes


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One kind of block."""

    kind: str  # "dense", "sliding", "moe", "mamba", …; blocks of one kind cost the same
    linears: tuple[LinearShape, ...]
    norms: tuple[NormShape, ...] = ()
    extras: tuple[ExtraShape, ...] = ()
    attention: AttentionShape | None = None
    moe: MoeShape | None = None
    mlp_width: int = 0  # of the dense MLP; 0: none
    is_parallel: bool = False  # attention and MLP read the same normalised input
    dropout: float = 0.0  # on the residual stream
    saves_after_exit: bool = False  # of the last region: for a norm, a scale or a replicated MLP
    profiles: tuple[BlockProfile, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        outside_linears = sum(part.num_parameters for part in self.norms) + sum(e.num_parameters for e in self.extras)
        return sum(linear.num_parameters for linear in self.linears) + outside_linears

    @cached_property
    def num_active_parameters(self) -> int:
        idle = sum(linear.num_parameters - linear.num_active_parameters for linear in self.linears)
        return self.num_parameters - idle

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters that expert parallelism partitions."""
        return sum(linear.num_parameters for linear in self.linears if linear.role == "expert")

    @property
    def saves_after_experts(self) -> bool:
        """Whether a tensor is saved after the output of the experts."""
        return self.dropout > 0 or (self.moe is not None and self.moe.saves_after_experts)

    @property
    def trained(self) -> BlockShape:
        """The block's trained parameters alone."""
        return replace(
            self,
            linears=tuple(linear for linear in self.linears if linear.is_trained),
            norms=tuple(norm for norm in self.norms if norm.is_trained),
            extras=tuple(extra for extra in self.extras if extra.is_trained),
        )

    def shards(self, role: str) -> bool:
        """Whether tensor parallelism shards the linears of this role."""
        return any(linear.role == role and linear.style == "row" for linear in self.linears)

    @cached_property
    def linear_flops_per_token(self) -> int:
        return sum(linear.flops_per_token for linear in self.linears)


SCALAR_HEAD = "weft_scalar_head"  # of a config: its model has one output per token


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All sizes of a model. `order` has one index into `kinds` per block."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[BlockShape, ...]
    order: tuple[int, ...]
    tied_head: bool
    max_positions: int = 0
    embedding_size: int = 0  # width of the token table; 0: hidden_size
    head_bias: bool = False
    has_sharded_table: bool = True  # tensor parallelism shards the token table, and the head, by vocabulary
    has_sharded_head: bool = True
    has_grids: bool = False  # tensor parallelism on grids supports the family
    has_straight_stream: bool = True  # one chain of blocks, so sequence parallel can shard hidden states
    caps_logits: bool = False  # logits go through a tanh
    final_norm: Literal["rms", "layer"] = "rms"
    outside: tuple[ExtraShape, ...] = ()  # other parameters outside blocks: final norms, learned positions
    dropout: float = 0.0
    whole_experts: str = ""  # why the experts cannot be divided over ranks; "" if they can, or if there are none
    is_exact: bool = True  # all parameters of the model are counted
    is_adapted: bool = False  # it has low-rank adapters beside frozen weights
    has_low_base: bool = False  # of them, what is not in codes rests in the compute dtype
    trains_ends: bool = True  # the token table or the head
    has_scores: bool = False  # the head is one row without bias: a score for each token
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        # hashing all fields would visit every matrix of every block at each cache lookup
        return hash((self.name, self.model_type, self.hidden_size, self.vocab_size, self.order, self.num_parameters))

    @cached_property
    def trained(self) -> ModelShape:
        """The shape of the trained parameters alone; the shape itself where the run freezes none by an adapter."""
        if not self.is_adapted:
            return self
        kinds, outside = (
            tuple(kind.trained for kind in self.kinds),
            tuple(extra for extra in self.outside if extra.is_trained),
        )
        ends = {} if self.trains_ends else {"vocab_size": 0, "head_bias": False, "has_scores": False}
        return replace(self, kinds=kinds, outside=outside, **ends)  # type: ignore[arg-type]

    @property
    def has_codes(self) -> bool:
        """Whether some frozen weights rest in codes."""
        return any(linear.code_bytes for kind in self.kinds for linear in kind.linears)

    def in_codes(self, code_bytes: float) -> ModelShape:
        """The shape of the matrices alone whose weights rest in codes of that size."""
        kinds = tuple(
            replace(
                kind,
                linears=tuple(replace(one, bias=False) for one in kind.linears if one.code_bytes == code_bytes),
                norms=(),
                extras=(),
            )
            for kind in self.kinds
        )
        return replace(self, kinds=kinds, outside=(), vocab_size=0, head_bias=False)

    @cached_property
    def code_sizes(self) -> tuple[float, ...]:
        """Bytes per weight of matrices in codes, each size once."""
        return tuple(sorted({one.code_bytes for kind in self.kinds for one in kind.linears if one.code_bytes}))

    @cached_property
    def scored(self) -> ModelShape:
        """The shape with a scalar head, which nothing is tied to, in place of its own."""
        return replace(self, has_scores=True, tied_head=False, head_bias=False, has_sharded_head=False)

    @property
    def num_logits(self) -> int:
        """Outputs of the head for each token."""
        return 1 if self.has_scores else self.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.order)

    @cached_property
    def has_dropout(self) -> bool:
        """Whether any rate is above 0; blocks with dropout are not compiled, since masks are drawn per row."""
        rates = [block.dropout for block in self.kinds]
        rates += [block.attention.dropout for block in self.kinds if block.attention is not None]
        return max(self.dropout, *rates) > 0

    @cached_property
    def kind_counts(self) -> tuple[int, ...]:
        counts = Counter(self.order)
        return tuple(counts[index] for index in range(len(self.kinds)))

    @property
    def expert_layers(self) -> tuple[tuple[int, int], ...]:
        """(experts, experts per token) of each kind of block with experts."""
        return tuple((kind.moe.num_experts, kind.moe.top_k) for kind in self.kinds if kind.moe is not None)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * (self.embedding_size or self.hidden_size)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head without a tied token table."""
        width = self.embedding_size or self.hidden_size
        own = 0 if self.tied_head else self.num_logits * width
        return own + (self.num_logits if self.head_bias else 0)

    @cached_property
    def block_parameters(self) -> int:
        return sum(kind.num_parameters * count for kind, count in zip(self.kinds, self.kind_counts, strict=True))

    @cached_property
    def num_parameters(self) -> int:
        outside = sum(extra.num_parameters for extra in self.outside)
        return self.embedding_parameters + self.block_parameters + outside + self.head_parameters

    @cached_property
    def num_active_parameters(self) -> int:
        idle = sum(
            (kind.num_parameters - kind.num_active_parameters) * count
            for kind, count in zip(self.kinds, self.kind_counts, strict=True)
        )
        return self.num_parameters - idle
