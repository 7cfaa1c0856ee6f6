"""Softmax attention as declarations: separate or fused q, k, v; grouped heads; QK-norm; sinks; gates; the latent kind.

Not the arithmetic of it. Widths: q = heads x head_dim, k = v = kv_heads x head_dim, o: heads x value_dim -> hidden.
One-dimensional tensor parallelism cuts q, k, v by column (whole heads), o by row; latent down-projections stay whole.
"""

from __future__ import annotations

from typing import Literal

from weft.core.model_shape import AttentionShape, ExtraShape, LinearShape, NormShape, Style
from weft.zoo.config import Config, Flag, Size
from weft.zoo.declared import Declared
from weft.zoo.parts import RMS, Norm, Parts, Place


class Attention(Declared):
    """Multi-head, grouped or multi-query attention."""

    prefix: str = "self_attn."
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    fused: str = ""  # one matrix for q, k and v, in place of the three
    bias: Flag = "attention_bias"
    k_bias: Flag | None = None  # None: as bias
    v_bias: Flag | None = None
    out_bias: Flag | None = None
    hidden: Size = "hidden_size"  # width of the input
    out: Size = "hidden_size"  # width of the output
    heads: Size = "num_attention_heads"
    kv_heads: Size = lambda config: config.kv_heads
    head_dim: Size = lambda config: config.head_dim
    value_dim: Size | None = None
    gate: str = ""  # a matrix whose sigmoid scales the output
    gate_size: Literal["width", "heads"] = "width"
    gate_bias: Flag = False
    doubled_q: bool = False  # q_proj makes the gate too
    qk_norm: Literal["", "head", "width", "every_head"] = ""
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm: Norm = RMS
    has_qk_norm: Flag = True
    sinks: str = ""
    has_sinks: Flag = True
    window: Size | None = None
    materialises: Flag = False
    rotary: Flag = True
    dropout: str = "attention_dropout"
    has_kv: bool = True  # False: keys and values of an earlier layer are used
    o_rows: Size | None = None  # input width of o, where the code does not take it from the heads
    is_idle: bool = (
        False  # parameters that plain causal training never uses, such as cross-attention without an encoder
    )

    def parts(self, config: Config) -> Parts:
        linears = [*self._inputs(config), *self._gate(config)]
        width = config.sized(self.heads) * self._value_dim(config) if self.o_rows is None else config.sized(self.o_rows)
        out_bias = self.bias if self.out_bias is None else self.out_bias
        linears.append(self._linear(self.o, width, config.sized(self.out), bias=config.flag(out_bias), style="row"))
        return Parts(
            linears=tuple(linears),
            norms=self._norms(config),
            extras=self._sinks(config),
            attention=None if self.is_idle else self.shape(config),
        )

    def _linear(self, name: str, width: int, out: int, *, bias: bool, style: Style = "column") -> LinearShape:
        return LinearShape(
            name=self.prefix + name,
            in_features=width,
            out_features=out,
            bias=bias,
            style=style,
            role="attention",
            active=0 if self.is_idle else 1,
        )

    def _value_dim(self, config: Config) -> int:
        return config.sized(self.head_dim if self.value_dim is None else self.value_dim)

    def _inputs(self, config: Config) -> list[LinearShape]:
        hidden, dim, heads = config.sized(self.hidden), config.sized(self.head_dim), config.sized(self.heads)
        kv_heads = config.sized(self.kv_heads) if self.has_kv else 0
        q, k, v = heads * dim * (2 if self.doubled_q else 1), kv_heads * dim, kv_heads * self._value_dim(config)
        bias = config.flag(self.bias)
        if self.fused:
            return [self._linear(self.fused, hidden, q + k + v, bias=bias)]
        k_bias = bias if self.k_bias is None else config.flag(self.k_bias)
        v_bias = bias if self.v_bias is None else config.flag(self.v_bias)
        found = [self._linear(self.q, hidden, q, bias=bias)]
        if self.has_kv:
            found.append(self._linear(self.k, hidden, k, bias=k_bias))
            if self.v:
                found.append(self._linear(self.v, hidden, v, bias=v_bias))
        return found

    def _gate(self, config: Config) -> list[LinearShape]:
        if not self.gate:
            return []
        heads = config.sized(self.heads)
        out = heads if self.gate_size == "heads" else heads * self._value_dim(config)
        return [self._linear(self.gate, config.sized(self.hidden), out, bias=config.flag(self.gate_bias))]

    def _norms(self, config: Config) -> tuple[NormShape, ...]:
        if not self.qk_norm or not config.flag(self.has_qk_norm):
            return ()
        query, key = (self.prefix + name for name in self.norm_names)
        found = [self._norm(config, query, config.sized(self.heads), place="query")]
        if self.norm_names[1] and self.has_kv:
            found.append(self._norm(config, key, config.sized(self.kv_heads), place="key"))
        return tuple(found)

    def _norm(self, config: Config, name: str, heads: int, *, place: Place) -> NormShape:
        """Over each head with shared weights, over each head with its own, or over all heads at once."""
        dim = config.sized(self.head_dim)
        if self.qk_norm == "width":
            return self.norm.shape(config, name, heads * dim, place=place)
        copies = heads if self.qk_norm == "every_head" else 1
        return self.norm.shape(config, name, dim, place=place, per=heads, copies=copies)

    def _sinks(self, config: Config) -> tuple[ExtraShape, ...]:
        if not self.sinks or not config.flag(self.has_sinks):
            return ()
        return (ExtraShape(name=self.prefix + self.sinks, num_parameters=config.sized(self.heads), style="column"),)

    def shape(self, config: Config) -> AttentionShape:
        return AttentionShape(
            num_heads=config.sized(self.heads),
            num_kv_heads=config.sized(self.kv_heads),
            head_dim=config.sized(self.head_dim),
            value_dim=self._value_dim(config),
            window=None if self.window is None else config.sized(self.window),
            materialises_scores=config.flag(self.materialises),
            rotary=config.flag(self.rotary),
            dropout=config.rate(self.dropout),
        )


class Latent(Declared):
    """Multi-head latent attention: queries and keys-values pass through a narrow, normalised latent."""

    prefix: str = "self_attn."
    bias: Flag = "attention_bias"
    out_bias: Flag | None = None
    heads: Size = "num_attention_heads"
    q_rank: str = "q_lora_rank"  # absent in the config: q is one matrix
    kv_rank: Size = "kv_lora_rank"
    rope_dim: Size = "qk_rope_head_dim"
    nope_dim: Size = "qk_nope_head_dim"
    value_dim: Size = "v_head_dim"
    gate: str = ""
    gate_size: Literal["width", "heads"] = "width"
    sinks: str = ""
    materialises: Flag = False
    window: Size | None = None
    dropout: str = "attention_dropout"

    def parts(self, config: Config) -> Parts:
        heads, value = config.sized(self.heads), config.sized(self.value_dim)
        q_linears, q_norms = self._queries(config)
        kv_linears, kv_norms = self._keys_values(config)
        out_bias = config.flag(self.bias if self.out_bias is None else self.out_bias)
        output = self._linear("o_proj", heads * value, config.hidden, bias=out_bias, style="row")
        gate_width = heads if self.gate_size == "heads" else heads * value
        gate = [self._linear(self.gate, config.hidden, gate_width, style="column")] if self.gate else []
        sinks = (ExtraShape(name=self.prefix + self.sinks, num_parameters=heads, style="column"),) if self.sinks else ()
        return Parts(
            linears=(*q_linears, *kv_linears, *gate, output),
            norms=(*q_norms, *kv_norms),
            extras=sinks,
            attention=self.shape(config),
        )

    def _linear(self, name: str, width: int, out: int, *, bias: bool = False, style: Style) -> LinearShape:
        return LinearShape(
            name=self.prefix + name, in_features=width, out_features=out, bias=bias, style=style, role="attention"
        )

    def _queries(self, config: Config) -> tuple[list[LinearShape], list[NormShape]]:
        width = config.sized(self.heads) * (config.sized(self.nope_dim) + config.sized(self.rope_dim))
        if config.get(self.q_rank) is None:
            return [self._linear("q_proj", config.hidden, width, style="column")], []
        rank, bias = config.number(self.q_rank), config.flag(self.bias)
        down = self._linear("q_a_proj", config.hidden, rank, bias=bias, style="replicated")
        norm = RMS.shape(config, f"{self.prefix}q_a_layernorm", rank, place="other")
        return [down, self._linear("q_b_proj", rank, width, style="column")], [norm]

    def _keys_values(self, config: Config) -> tuple[list[LinearShape], list[NormShape]]:
        rank, rope = config.sized(self.kv_rank), config.sized(self.rope_dim)
        width = config.sized(self.heads) * (config.sized(self.nope_dim) + config.sized(self.value_dim))
        down = self._linear(
            "kv_a_proj_with_mqa", config.hidden, rank + rope, bias=config.flag(self.bias), style="replicated"
        )
        norm = RMS.shape(config, f"{self.prefix}kv_a_layernorm", rank, place="other")
        return [down, self._linear("kv_b_proj", rank, width, style="column")], [norm]

    def shape(self, config: Config) -> AttentionShape:
        rope = config.sized(self.rope_dim)
        return AttentionShape(
            num_heads=config.sized(self.heads),
            num_kv_heads=config.sized(self.heads),
            head_dim=config.sized(self.nope_dim) + rope,
            value_dim=config.sized(self.value_dim),
            window=None if self.window is None else config.sized(self.window),
            materialises_scores=config.flag(self.materialises),
            is_latent=True,
            latent_dim=config.sized(self.kv_rank) + rope,
            dropout=config.rate(self.dropout),
        )
