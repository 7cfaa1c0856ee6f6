"""The bytes autograd keeps of one block, per token of a micro-batch, from the operators an HF block is made of.

What each operator keeps for its backward (c: bytes of the compute dtype, h: hidden, a·d: query width, k·d: key width):

| operator               | keeps                                                                          |
| ---------------------- | ------------------------------------------------------------------------------ |
| RMSNorm, written out   | the input in float32 (4h), the normalised input (ch), one float32 a vector     |
| LayerNorm              | its input (ch), two float32                                                    |
| linears                | their input, once where several read the same                                  |
| fused attention        | q, k, v, its output, one float32 a head                                        |
| attention with scores  | as above, with k and v repeated for each head, and the probabilities (4 + c) a key |
| act(gate) * up         | gate, act(gate), up; the product is the next linear's input                    |

Sums by how tensor parallelism cuts them: `stream` only with sequence parallel, `gathered` never, `split` always.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from weft.core.model_shape import AttentionShape, BlockShape, LinearShape, NormShape
from weft.plan.columns import TP_MODES, Columns, Floats
from weft.plan.memory.block_tensors import is_inside, is_key_value

# Tensors of the MLP's width that an activation function keeps, its output not counted. gelu_new is written out in
# Python: a cube, a tanh and two products; fused ones keep their input; relu keeps only its output.
ACTIVATION_KEEPS = {
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
class Kept:
    """Bytes a token, by what divides them."""

    stream: float = 0.0  # the residual stream and its norms: divided under sequence parallel
    gathered: float = 0.0  # inputs of column-parallel linears: whole on every tensor rank
    split: float = 0.0  # inside attention and MLP: divided by tp
    key_value: float = 0.0  # divided by tp as far as there are key-value heads
    scores: float = 0.0  # bytes for every key a query sees: times the sequence, divided by tp
    routed: float = 0.0  # expert inputs and outputs: of all tokens, or with ep of those the router sends here
    copied: float = 0.0  # whole copies that only sequence parallel makes: a second gather of the same input
    whole_scores: float = 0.0  # of attention that is not cut

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            self.stream + other.stream,
            self.gathered + other.gathered,
            self.split + other.split,
            self.key_value + other.key_value,
            self.scores + other.scores,
            self.routed + other.routed,
            self.copied + other.copied,
            self.whole_scores + other.whole_scores,
        )

    @property
    def uncut(self) -> Kept:
        """Of a part that tensor parallelism leaves whole."""
        return Kept(
            stream=self.stream,
            gathered=self.gathered + self.split + self.key_value,
            routed=self.routed,
            whole_scores=self.scores,
        )

    def __sub__(self, other: Kept) -> Kept:
        return self + Kept(*(-getattr(other, field.name) for field in fields(other)))


def kept_by(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> Kept:
    """Everything the block keeps without recomputation."""
    total = Kept()
    for norm in block.norms:
        total = total + _norm(norm, compute_bytes)
    parts = {
        "attention": _attention(block, compute_bytes, writes_scores, hidden_size),
        "mlp": _mlp(block, compute_bytes, hidden_size),
        "expert": _experts(block, compute_bytes, hidden_size),
    }
    if block.attention is None:
        parts["attention"] = _mixer(block, compute_bytes, hidden_size)
    for role, kept in parts.items():
        total = total + (kept if block.cuts(role) else kept.uncut)
    if block.dropout > 0:
        total = total + Kept(stream=2.0 * hidden_size)  # two masks of a byte
    return total


def kept_selectively(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> Kept:
    """With what linears and fused attention give saved, the rest computed again: the block's input and those outputs.

    Attention that writes its scores out is computed again as a whole: its scores are what is not to be kept.
    """
    c = compute_bytes
    total = Kept(stream=c * hidden_size)
    for linear in block.linears:
        out = float(c * linear.active * linear.out_features)
        if linear.role == "expert":
            total = total + (Kept(split=out) if linear.style == "column" else Kept(routed=out))
        elif linear.style == "column":
            total = total + (Kept(key_value=out) if is_key_value(linear) else Kept(split=out))
        elif linear.style == "row" or is_inside(linear.name, block):
            total = total + Kept(gathered=out)  # a row's terms of the sum, before it is cut
        else:
            total = total + Kept(stream=out)
    if block.attention is not None and not writes_scores:
        attention = block.attention
        fused = Kept(split=attention.num_heads * (c * attention.value_dim + 4.0))
        total = total + (fused if block.cuts("attention") else fused.uncut)
    return total


def kept_compiled(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> Kept:
    """Of a compiled block: nearly as selectively, but for what a backward reads and no product gave, or the other way.

    What is only added to the stream is not read; what tokens' experts are given is; so are queries and keys once they
    are rotated, beside a fused output that the values are views of or what their norms read. Attention with scores is
    two products like others: the scores are kept, and what these read and give, keys and values repeated for each head.
    """
    c = compute_bytes
    kept = kept_selectively(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden_size)
    added = [linear for linear in block.linears if linear.style == "row" and linear.role in _only_added(block)]
    kept = kept - Kept(gathered=float(sum(c * linear.out_features for linear in added)))
    if block.moe is not None:
        kept = kept + Kept(routed=float(c * block.moe.top_k * hidden_size))
    attention = block.attention
    if attention is None:
        return kept
    if _keeps_fused_output(block) or any(norm.place in ("query", "key") for norm in block.norms):
        rotated = _rotated(attention, c)
        kept = kept + (rotated if block.cuts("attention") else rotated.uncut)
    if not writes_scores:
        return kept
    repeated = attention.num_heads - attention.num_kv_heads
    around = attention.num_heads * attention.value_dim + repeated * (attention.head_dim + attention.value_dim)
    scores = Kept(scores=float(c * attention.num_heads), split=float(c * around))
    return kept + (scores if block.cuts("attention") else scores.uncut)


def kept_fully(*, compute_bytes: int, hidden_size: int) -> Kept:
    """With the whole block computed again: its input."""
    return Kept(stream=float(compute_bytes * hidden_size))


def bytes_of(kept: Kept, block: BlockShape, columns: Columns, *, tokens: Floats, keys: Floats) -> Floats:
    """Bytes on a rank whose micro-batch has `tokens` tokens that see up to `keys` keys."""
    tp = columns.tp.astype(np.float64)
    cut_all = columns.tp_mode != TP_MODES.index("1d")  # 2D and beyond cut every activation
    stream_cut = np.where((columns.sequence_parallel > 0) | cut_all, tp, 1.0)
    gathered_cut = np.where(cut_all, tp, 1.0)
    heads = block.attention.num_kv_heads if block.attention else 1
    key_value_cut = np.minimum(tp, heads)
    a_token = (
        kept.stream / stream_cut
        + kept.gathered / gathered_cut
        + kept.split / tp
        + kept.key_value / key_value_cut
        + kept.scores * keys / tp
        + kept.whole_scores * keys / gathered_cut
        + kept.routed / np.where(columns.ep > 1, tp, 1.0)  # dealt out among the tensor ranks that hold the experts
        + kept.copied * ((columns.sequence_parallel > 0) & (tp > 1) & ~cut_all)
    )
    return np.asarray(tokens * a_token, dtype=np.float64)


def _norm(norm: NormShape, c: int) -> Kept:
    in_float32, in_compute = norm.kept_tensors or ((1, 1) if norm.kind == "rms" else (0, 1))
    statistics = 4 if norm.kind == "rms" else 8
    kept = float(norm.per * ((4 * in_float32 + c * in_compute) * norm.size + statistics))
    match norm.place:
        case "residual":
            return Kept(stream=kept)
        case "key":
            return Kept(key_value=kept)
        case "query":
            return Kept(split=kept)
        case _:
            return Kept(gathered=kept)


def _attention(block: BlockShape, c: int, writes_scores: bool, hidden_size: int) -> Kept:
    attention = block.attention
    if attention is None:
        return Kept()
    query = attention.num_heads * attention.head_dim
    value_out = attention.num_heads * attention.value_dim
    shared_input = Kept(gathered=float(c * hidden_size))
    latents = sum(c * linear.out_features for linear in block.linears if _is_latent(linear, block))
    kept = shared_input + Kept(gathered=float(latents), split=float(c * (query + value_out)))
    if attention.copies_output:
        kept = kept + Kept(split=float(c * value_out))
    if _keeps_fused_output(block):  # rotated copies, and values that are views of the whole fused output
        kept = kept + _rotated(attention, c)
    if attention.is_latent:  # keys are put together head by head, so none is shared
        return kept + Kept(split=float(c * (query + value_out) + 4 * attention.num_heads))
    if writes_scores:
        return kept + Kept(
            split=float(c * (query + value_out)), scores=float(attention.num_heads * _score_bytes(attention, c))
        )
    key_value = attention.num_kv_heads * (attention.head_dim + attention.value_dim)
    return kept + Kept(key_value=float(c * key_value), split=4.0 * attention.num_heads)


def _is_latent(linear: LinearShape, block: BlockShape) -> bool:
    """A projection down to a latent: whole where the rest of attention is cut."""
    is_whole = linear.role == "attention" and linear.style == "replicated"
    return is_whole and (block.cuts("attention") or "_a_proj" in linear.name)


def _score_bytes(attention: AttentionShape, c: int) -> int:
    """Probabilities in float32, their cast to the compute dtype where that is another, the tanh of a soft cap."""
    return (4 if c == 4 else 4 + c) + (c if attention.caps_scores else 0)


def _rotated(attention: AttentionShape, c: int) -> Kept:
    """Queries and keys."""
    return Kept(
        split=float(c * attention.num_heads * attention.head_dim),
        key_value=float(c * attention.num_kv_heads * attention.head_dim),
    )


def _only_added(block: BlockShape) -> tuple[str, ...]:
    """Roles whose last product goes into the stream as it is, and is read by nothing else in the block."""
    if block.ends_in_norm:
        return ()
    return ("attention", "mlp") if block.is_parallel else ("mlp",)


def _keeps_fused_output(block: BlockShape) -> bool:
    names = {linear.name.rpartition(".")[2] for linear in block.linears if linear.role == "attention"}
    is_fused = bool(names & {"qkv_proj", "query_key_value", "Wqkv", "W_pack"})
    return is_fused and block.attention is not None and block.attention.rotary


def _mlp(block: BlockShape, c: int, hidden_size: int) -> Kept:
    if block.mlp_width == 0:
        return Kept()
    keeps = ACTIVATION_KEEPS.get(block.activation, 1)
    tensors = keeps + (3 if block.is_gated else 1)
    own_input = Kept(gathered=float(c * hidden_size))
    if block.is_parallel:
        own_input = _parallel_input(block, own_input, c, hidden_size)
    return own_input + Kept(split=float(c * tensors * block.mlp_width))


def _parallel_input(block: BlockShape, own_input: Kept, c: int, hidden_size: int) -> Kept:
    """One norm: attention and MLP read the same tensor. Two: each has its own, but LayerNorms share what they keep."""
    norms = [norm for norm in block.norms if norm.place == "residual"]
    if len(norms) < 2:
        return Kept(copied=own_input.gathered)
    return own_input - Kept(stream=float(c * hidden_size)) if norms[0].kind == "layer" else own_input


def _experts(block: BlockShape, c: int, hidden_size: int) -> Kept:
    moe = block.moe
    if moe is None:
        return Kept()
    keeps = ACTIVATION_KEEPS.get(block.activation, 1)
    tensors = keeps + (3 if block.is_gated else 1)
    router = 4.0 * 2 * moe.num_experts
    # a token's copies on the way in and its weighted outputs on the way back
    routed = float(c * moe.top_k * 2 * hidden_size)
    inner = float(c * tensors * (moe.top_k * moe.expert_width + moe.shared_width))
    return Kept(gathered=float(c * hidden_size) + router, split=inner, routed=routed)


def _mixer(block: BlockShape, c: int, hidden_size: int) -> Kept:
    """A block that mixes tokens without attention: what its own linears give, counted twice for its scan."""
    own = [linear for linear in block.linears if linear.role in ("attention", "other")]
    return Kept(gathered=float(c * hidden_size), split=float(sum(2 * c * linear.out_features for linear in own)))


def mean_keys(attention: AttentionShape, sequence_length: int) -> float:
    """Keys a query sees on average under a causal mask, fewer where the layer slides."""
    if attention.window is None or attention.window >= sequence_length:
        return (sequence_length + 1) / 2
    window = attention.window
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
