"""Zamba and Zamba 2: Mamba layers, some of which pass through one transformer block whose weights they share.

Not an ordinary hybrid (see state_space). The shared block is counted where it is first used; its FLOPs too, so they are
too few by the later uses: a note says so.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp
from weft.zoo.parts import RMS, Listed, Matrix, Piece, Several
from weft.zoo.recurrent import convolution, dt_rank, mamba2

_NOTE = "the FLOPs of the shared transformer are counted at its first use only"


def inner(config: Config) -> int:
    return int(config.get("mamba_expand", 2) * config.hidden)


def doubled(config: Config) -> int:
    """The shared block reads the hidden state beside the embedding."""
    return int(config.get("attention_hidden_size") or 2 * config.hidden)


def shared_dim(config: Config) -> int:
    return int(config.get("attention_head_dim") or 2 * config.hidden // config.heads)


def zamba_kinds(config: Config) -> list[str]:
    period, offset = config.number("attn_layer_period"), config.number("attn_layer_offset")
    rest = ["hybrid" if index % period == offset else "linear" for index in range(config.layers - 3)]
    return _given(config) or ["linear", "linear", "hybrid", *rest]


def zamba2_kinds(config: Config) -> list[str]:
    default = ["linear"] + (["linear"] * 5 + ["hybrid"]) * 7 + ["linear"] * 4 + ["hybrid"] + ["linear"] * 3
    return _given(config) or [*default, "hybrid", "linear", "linear"]


def _given(config: Config) -> list[str]:
    return ["hybrid" if name == "hybrid" else "linear" for name in config.get("layers_block_type") or ()]


def zamba_layers(config: Config) -> list[Layer]:
    return _owned(config, zamba_kinds(config), blocks=1)


def zamba2_layers(config: Config) -> list[Layer]:
    """num_mem_blocks shared blocks take turns; each brings an adapter for every layer that will use it."""
    kinds, blocks = zamba2_kinds(config), int(config.get("num_mem_blocks", 1))
    uses, seen, layers = kinds.count("hybrid"), 0, []
    for layer in _owned(config, kinds, blocks=blocks):
        adapted = (("num_adapters", len(range(seen % blocks, uses, blocks))),)
        layers.append(layer._replace(own=adapted) if layer.mixer == "hybrid" else layer)
        seen += layer.mixer != "linear"
    return layers


def _owned(config: Config, kinds: list[str], *, blocks: int) -> list[Layer]:
    """The first `blocks` hybrid layers own the shared weights, the others borrow: sharing is tying, as for the head."""
    owners = blocks if config.flag("tie_word_embeddings") else len(kinds)
    found, layers = 0, []
    for kind in kinds:
        is_owner = kind == "hybrid" and found < owners
        found += kind == "hybrid"
        layers.append(Layer("hybrid", "dense") if is_owner else Layer("borrowing" if kind == "hybrid" else kind, ""))
    return layers


def mamba_of_heads(prefix: str) -> Listed:
    """Zamba's Mamba: the projections of the time step are tensors of all heads."""
    rank = dt_rank("mamba_dt_rank")
    return Listed(
        prefix=prefix,
        matrices=(
            Matrix("in_proj", "hidden_size", lambda config: 2 * inner(config), "column", "mamba_proj_bias"),
            Matrix("out_proj", inner, "hidden_size", "row", "mamba_proj_bias"),
        ),
        extras=(
            ("x_proj_weight", lambda c: (c.sized(rank) + 2 * c.number("mamba_d_state")) * inner(c)),
            ("dt_proj_weight", lambda c: c.sized(rank) * inner(c)),
            ("dt_proj_bias", inner),
            ("A_log", lambda c: inner(c) * c.number("mamba_d_state")),
            ("D", inner),
            *convolution("conv1d", channels=inner, kernel="mamba_d_conv", bias="mamba_conv_bias"),
        ),
    )


def mamba2_of_zamba(prefix: str) -> Listed:
    return mamba2(
        prefix, inner=inner, state="mamba_d_state", kernel="mamba_d_conv", heads="n_mamba_heads",
        groups="mamba_ngroups", bias="add_bias_linear", conv_bias=True,
    )  # fmt: skip


def adapters(config: Config, rows: int, out: int) -> int:
    return config.number("num_adapters") * config.number("adapter_rank") * (rows + out)


def zamba_family(name: str, mamba: Piece, inside: Piece, *, feed: Mlp, beside: tuple[Piece, ...] = ()) -> Family:
    attention = Attention(prefix=f"{name}.self_attn.", bias=False, hidden=doubled, head_dim=shared_dim, rotary=False)
    norms = Listed(
        prefix=f"{name}.",
        norms=(("input_layernorm", doubled, RMS), ("pre_ff_layernorm", "hidden_size", RMS)),
    )
    link = Listed(matrices=(Matrix("linear", "hidden_size", "hidden_size"),))
    return Family(
        mixers={
            "linear": mamba,
            "hybrid": Several(pieces=(attention, norms, *beside, link, inside)),
            "borrowing": Several(pieces=(link, inside)),
        },
        feeds={"dense": feed},
        pattern=zamba_layers,
        norms=("mamba_decoder.input_layernorm",),
        own_norms={"linear": ("input_layernorm",)},
        final_norm="final_layernorm",
        notes=(_NOTE,),
    )


ZAMBA2_ADAPTERS = Listed(
    prefix="shared_transformer.",
    extras=(
        (
            "feed_forward.gate_up_proj_adapter_list.**",
            lambda config: adapters(config, config.hidden, 2 * zamba2_width(config)),
        ),
        *(
            (
                f"self_attn.linear_{name}_adapter_list.**",
                lambda config: (
                    adapters(config, doubled(config), doubled(config)) * config.flag("use_shared_attention_adapter")
                ),
            )
            for name in "qkv"
        ),
    ),
)


def zamba2_width(config: Config) -> int:
    return int(config.get("intermediate_size") or 4 * config.hidden)


FAMILIES: dict[str, Family] = {
    "zamba": zamba_family(
        "shared_transf",
        mamba_of_heads("mamba."),
        mamba_of_heads("mamba_decoder.mamba."),
        feed=Mlp(prefix="shared_transf.feed_forward.", bias=False),
    ),
    "zamba2": replace(
        zamba_family(
            "shared_transformer",
            mamba2_of_zamba("mamba."),
            mamba2_of_zamba("mamba_decoder.mamba."),
            feed=Mlp(
                prefix="shared_transformer.feed_forward.", fused="gate_up_proj", bias="add_bias_linear",
                width=zamba2_width,
            ),
            beside=(ZAMBA2_ADAPTERS,),
        ),
        pattern=zamba2_layers,
    ),
}  # fmt: skip
