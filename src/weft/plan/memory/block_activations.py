"""Saved activations of one block in bytes per token of a micro-batch, from the operators of a Hugging Face block.

Tensors that each operator saves for its backward (c: bytes of the compute dtype, h: hidden size):

| operator               | saves                                                                          |
| ---------------------- | ------------------------------------------------------------------------------ |
| RMSNorm, written out   | the input in float32 (4h), the normalised input (ch), one float32 per vector   |
| LayerNorm              | its input (ch), two float32                                                    |
| linears                | their input, once where several read the same                                  |
| fused attention        | q, k, v, its output, one float32 per head                                      |
| attention with scores  | as above, with k and v repeated for each head, and the probabilities (4 + c) per key |
| act(gate) * up         | gate, act(gate), up; the result is the next linear's input                     |

Sums by sharding over tp: `stream` only with sequence parallel, `gathered` never, `split` always.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from weft.core.model_shape import AttentionShape, BlockShape, LinearShape, NormShape
from weft.plan.columns import TP_MODES, Columns, Floats
from weft.plan.memory.block_tensors import is_inside, is_key_value

# Tensors of the MLP's width that an activation function saves, its output not counted. gelu_new is written in Python:
# a cube, a tanh and two multiplications; fused functions save their input; relu saves only its output.
SAVED_BY_ACTIVATION = {
    "silu": 1,
    "swish": 1,
    "gelu": 1,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 4,
    "gelu_fast": 4,
    "gelu_python": 3,
    "quick_gelu": 2,
    "relu": 0,
    "relu2": 1,
    "xielu": 4,
}


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


def saved_by_default(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    """Saved activations of a block without recompute."""
    total = SavedBytes()
    for norm in block.norms:
        total = total + _norm(norm, compute_bytes)
    parts = {
        "attention": _attention(block, compute_bytes, writes_scores, hidden_size),
        "mlp": _mlp(block, compute_bytes, hidden_size),
        "expert": _experts(block, compute_bytes, hidden_size),
    }
    if block.attention is None:
        parts["attention"] = _mixer(block, compute_bytes, hidden_size)
    for role, saved in parts.items():
        total = total + (saved if block.shards(role) else saved.unsharded)
    if block.dropout > 0:
        total = total + SavedBytes(stream=2.0 * hidden_size)  # two masks of one byte
    return total


def saved_by_selective(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    """Saved activations under selective recompute: the block's input, outputs of linears and of fused attention.

    Attention with materialised scores is recomputed, so that its scores are not saved.
    """
    c = compute_bytes
    total = SavedBytes(stream=c * hidden_size)
    for linear in block.linears:
        out = float(c * linear.active * linear.out_features)
        if linear.role == "expert":
            total = total + (SavedBytes(split=out) if linear.style == "column" else SavedBytes(routed=out))
        elif linear.style == "column":
            total = total + (SavedBytes(key_value=out) if is_key_value(linear) else SavedBytes(split=out))
        elif linear.style == "row" or is_inside(linear.name, block):
            total = total + SavedBytes(gathered=out)  # partial sums of a row-parallel linear
        else:
            total = total + SavedBytes(stream=out)
    if block.attention is not None and not writes_scores:
        attention = block.attention
        fused = SavedBytes(split=attention.num_heads * (c * attention.value_dim + 4.0))
        total = total + (fused if block.shards("attention") else fused.unsharded)
    return total


def saved_by_compiled(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    """Saved activations of a compiled block: those of selective recompute, with these differences.

    Outputs that are only added to the stream are not saved. Inputs of experts are saved, and rotated queries and keys
    where values are views of a fused output or queries and keys have norms. Materialised scores are saved, with their
    operands and results: keys and values repeated for each head.
    """
    c = compute_bytes
    saved = saved_by_selective(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden_size)
    added = [linear for linear in block.linears if linear.style == "row" and linear.role in _only_added(block)]
    saved = saved - SavedBytes(gathered=float(sum(c * linear.out_features for linear in added)))
    if block.moe is not None:
        saved = saved + SavedBytes(routed=float(c * block.moe.top_k * hidden_size))
    attention = block.attention
    if attention is None:
        return saved
    if _saves_fused_output(block) or any(norm.place in ("query", "key") for norm in block.norms):
        rotated = _rotated(attention, c)
        saved = saved + (rotated if block.shards("attention") else rotated.unsharded)
    if not writes_scores:
        return saved
    repeated = attention.num_heads - attention.num_kv_heads
    around = attention.num_heads * attention.value_dim + repeated * (attention.head_dim + attention.value_dim)
    scores = SavedBytes(scores=float(c * attention.num_heads), split=float(c * around))
    return saved + (scores if block.shards("attention") else scores.unsharded)


def saved_by_full(*, compute_bytes: int, hidden_size: int) -> SavedBytes:
    """Saved activations under full recompute: the block's input."""
    return SavedBytes(stream=float(compute_bytes * hidden_size))


def bytes_of(saved: SavedBytes, block: BlockShape, columns: Columns, *, tokens: Floats, keys: Floats) -> Floats:
    """Bytes on a rank whose micro-batch has `tokens` tokens that see up to `keys` keys."""
    tp = columns.tp.astype(np.float64)
    shards_all = columns.tp_mode != TP_MODES.index("1d")  # grids shard every activation
    stream_divisor = np.where((columns.sequence_parallel > 0) | shards_all, tp, 1.0)
    gathered_divisor = np.where(shards_all, tp, 1.0)
    heads = block.attention.num_kv_heads if block.attention else 1
    key_value_divisor = np.minimum(tp, heads)
    per_token = (
        saved.stream / stream_divisor
        + saved.gathered / gathered_divisor
        + saved.split / tp
        + saved.key_value / key_value_divisor
        + saved.scores * keys / tp
        + saved.unsharded_scores * keys / gathered_divisor
        + saved.routed / np.where(columns.ep > 1, tp, 1.0)  # partitioned over the tensor ranks that hold the experts
        + saved.copied * ((columns.sequence_parallel > 0) & (tp > 1) & ~shards_all)
    )
    return np.asarray(tokens * per_token, dtype=np.float64)


def _norm(norm: NormShape, c: int) -> SavedBytes:
    in_float32, in_compute = norm.saved_tensors or ((1, 1) if norm.kind == "rms" else (0, 1))
    statistics = 4 if norm.kind == "rms" else 8
    saved = float(norm.per * ((4 * in_float32 + c * in_compute) * norm.size + statistics))
    match norm.place:
        case "residual":
            return SavedBytes(stream=saved)
        case "key":
            return SavedBytes(key_value=saved)
        case "query":
            return SavedBytes(split=saved)
        case _:
            return SavedBytes(gathered=saved)


def _attention(block: BlockShape, c: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    attention = block.attention
    if attention is None:
        return SavedBytes()
    query = attention.num_heads * attention.head_dim
    value_out = attention.num_heads * attention.value_dim
    shared_input = SavedBytes(gathered=float(c * hidden_size))
    latents = sum(c * linear.out_features for linear in block.linears if _is_latent(linear, block))
    saved = shared_input + SavedBytes(gathered=float(latents), split=float(c * (query + value_out)))
    if attention.copies_output:
        saved = saved + SavedBytes(split=float(c * value_out))
    if _saves_fused_output(block):  # rotated copies, and values that are views of the fused output
        saved = saved + _rotated(attention, c)
    if attention.is_latent:  # keys are concatenated per head, so heads share none
        return saved + SavedBytes(split=float(c * (query + value_out) + 4 * attention.num_heads))
    if writes_scores:
        return saved + SavedBytes(
            split=float(c * (query + value_out)), scores=float(attention.num_heads * _score_bytes(attention, c))
        )
    key_value = attention.num_kv_heads * (attention.head_dim + attention.value_dim)
    return saved + SavedBytes(key_value=float(c * key_value), split=4.0 * attention.num_heads)


def _is_latent(linear: LinearShape, block: BlockShape) -> bool:
    """Whether a linear projects down to a latent, which is replicated where the rest of attention is sharded."""
    is_replicated = linear.role == "attention" and linear.style == "replicated"
    return is_replicated and (block.shards("attention") or "_a_proj" in linear.name)


def _score_bytes(attention: AttentionShape, c: int) -> int:
    """Bytes per score: the float32 probability, its cast to another compute dtype, the tanh of a soft cap."""
    return (4 if c == 4 else 4 + c) + (c if attention.caps_scores else 0)


def _rotated(attention: AttentionShape, c: int) -> SavedBytes:
    """Rotated queries and keys."""
    return SavedBytes(
        split=float(c * attention.num_heads * attention.head_dim),
        key_value=float(c * attention.num_kv_heads * attention.head_dim),
    )


def _only_added(block: BlockShape) -> tuple[str, ...]:
    """Roles whose last matmul is added to the stream unchanged and is read by nothing else in the block."""
    if block.ends_in_norm:
        return ()
    return ("attention", "mlp") if block.is_parallel else ("mlp",)


def _saves_fused_output(block: BlockShape) -> bool:
    names = {linear.name.rpartition(".")[2] for linear in block.linears if linear.role == "attention"}
    is_fused = bool(names & {"qkv_proj", "query_key_value", "Wqkv", "W_pack"})
    return is_fused and block.attention is not None and block.attention.rotary


def _mlp(block: BlockShape, c: int, hidden_size: int) -> SavedBytes:
    if block.mlp_width == 0:
        return SavedBytes()
    saves = SAVED_BY_ACTIVATION.get(block.activation, 1)
    tensors = saves + (3 if block.is_gated else 1)
    own_input = SavedBytes(gathered=float(c * hidden_size))
    if block.is_parallel:
        own_input = _parallel_input(block, own_input, c, hidden_size)
    return own_input + SavedBytes(split=float(c * tensors * block.mlp_width))


def _parallel_input(block: BlockShape, own_input: SavedBytes, c: int, hidden_size: int) -> SavedBytes:
    """Input of a parallel MLP. One norm: attention reads it too. Two: each has its own, but LayerNorms share theirs."""
    norms = [norm for norm in block.norms if norm.place == "residual"]
    if len(norms) < 2:
        return SavedBytes(copied=own_input.gathered)
    return own_input - SavedBytes(stream=float(c * hidden_size)) if norms[0].kind == "layer" else own_input


def _experts(block: BlockShape, c: int, hidden_size: int) -> SavedBytes:
    moe = block.moe
    if moe is None:
        return SavedBytes()
    saves = SAVED_BY_ACTIVATION.get(block.activation, 1)
    tensors = saves + (3 if block.is_gated else 1)
    router = 4.0 * 2 * moe.num_experts
    # inputs of a token's experts and their weighted outputs
    routed = float(c * moe.top_k * 2 * hidden_size)
    inner = float(c * tensors * (moe.top_k * moe.expert_width + moe.shared_width))
    return SavedBytes(gathered=float(c * hidden_size) + router, split=inner, routed=routed)


def _mixer(block: BlockShape, c: int, hidden_size: int) -> SavedBytes:
    """Saved activations of a block without attention: outputs of its linears, counted twice for its scan."""
    own = [linear for linear in block.linears if linear.role in ("attention", "other")]
    return SavedBytes(gathered=float(c * hidden_size), split=float(sum(2 * c * linear.out_features for linear in own)))


def mean_keys(attention: AttentionShape, sequence_length: int) -> float:
    """Mean number of keys per query under a causal mask and a sliding window."""
    if attention.window is None or attention.window >= sequence_length:
        return (sequence_length + 1) / 2
    window = attention.window
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
