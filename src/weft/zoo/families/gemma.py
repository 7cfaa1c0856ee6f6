"""Gemma 3n and Gemma 4: layers that borrow keys and values, inputs of each layer's own, wider heads in full attention.

Not Gemma 1 to 3 (see dense). The last `num_kv_shared_layers` layers have no k and v; each layer reads a slice of its
own, hidden_size_per_layer_input wide, of a second table.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import FOUR_NORMS, HEAD_NORM
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import BARE_RMS, RMS, Listed, Matrix, Piece, Several
from weft.zoo.patterns import listed


def per_layer(config: Config) -> int:
    return int(config.get("hidden_size_per_layer_input", 0))


def all_layers(config: Config) -> int:
    return config.layers * per_layer(config)


def first_sharing(config: Config) -> int:
    return config.layers - int(config.get("num_kv_shared_layers", 0))


def gemma4_layers(config: Config) -> list[Layer]:
    """Full layers have heads of their own size; the last layer is always full."""
    names = listed(lambda config: ["sliding" if (i + 1) % 6 else "full" for i in range(config.layers)])(config)
    names = [*names[:-1], "full"]
    wide: list[tuple[str, object]] = [("head_dim", int(config.get("global_head_dim", 512)))]
    if config.get("num_global_key_value_heads") is not None and config.get("attention_k_eq_v", True):
        wide.append(("num_key_value_heads", config.number("num_global_key_value_heads")))
    feed = "moe" if config.flag("enable_moe_block") else "dense"
    start = first_sharing(config)
    layers = []
    for index, name in enumerate(names):
        is_sharing = index >= start
        doubled = (("intermediate_size", 2 * config.number("intermediate_size")),)
        own = (
            *(wide if name == "full" else ()),
            *(doubled if is_sharing and config.flag("use_double_wide_mlp") else ()),
        )
        layers.append(Layer(_piece(name, is_sharing, config.flag("attention_k_eq_v")), feed, own))
    return layers


def gemma3n_layers(config: Config) -> list[Layer]:
    """intermediate_size may be a list, one width a layer."""
    names = listed(lambda config: ["sliding" if (i + 1) % 5 else "full" for i in range(config.layers)])(config)
    given = config.get("intermediate_size")
    widths = list(given) if isinstance(given, (list, tuple)) else [given] * config.layers
    start = first_sharing(config)
    return [
        Layer(_piece(name, index >= start > 0, False), own=(("intermediate_size", widths[index]),))
        for index, name in enumerate(names)
    ]


def _piece(name: str, is_sharing: bool, is_same_kv: bool) -> str:
    if is_sharing:
        return f"{name}_sharing"
    return "full_same_kv" if name == "full" and is_same_kv else name


VALUE_NORM = Listed(norms=(("self_attn.v_norm", lambda config: config.head_dim, BARE_RMS),))


def gemma_mixers(attention: Attention) -> dict[str, Piece]:
    """With and without a window; with and without keys and values of the layer's own."""
    slid = replace(attention, window="sliding_window")
    return {
        "full": Several(pieces=(attention, VALUE_NORM)),
        "sliding": Several(pieces=(slid, VALUE_NORM)),
        "full_same_kv": Several(pieces=(replace(attention, v=""), VALUE_NORM)),
        "full_sharing": replace(attention, has_kv=False),
        "sliding_sharing": replace(slid, has_kv=False),
    }


PER_LAYER = Listed(
    matrices=(
        Matrix("per_layer_input_gate", "hidden_size", per_layer, when=lambda config: per_layer(config) > 0),
        Matrix("per_layer_projection", per_layer, "hidden_size", when=lambda config: per_layer(config) > 0),
    ),
)
LAUREL = Listed(
    matrices=(
        Matrix("laurel.linear_left", "hidden_size", "laurel_rank"),
        Matrix("laurel.linear_right", "laurel_rank", "hidden_size"),
    ),
    norms=(("laurel.post_laurel_norm", "hidden_size", RMS),),
)
ALTUP = Listed(
    prefix="altup.",
    matrices=(
        Matrix("correction_coefs", "altup_num_inputs", "altup_num_inputs"),
        Matrix("prediction_coefs", "altup_num_inputs", lambda config: config.number("altup_num_inputs") ** 2),
        Matrix("modality_router", "hidden_size", "altup_num_inputs"),
    ),
    norms=(("router_norm", "hidden_size", RMS),),
    extras=(("correct_output_scale", "hidden_size"),),
)
DENSE = Mlp(bias=False)
TABLES = (
    ("embed_tokens_per_layer", lambda config: all_layers(config) * int(config.get("vocab_size_per_layer_input", 0))),
    ("per_layer_model_projection", lambda config: all_layers(config) * config.hidden),
    ("per_layer_projection_norm", per_layer),
)
GEMMA4 = Family(
    mixers=gemma_mixers(HEAD_NORM),
    feeds={
        "dense": Several(pieces=(DENSE, PER_LAYER)),
        "moe": Several(
            pieces=(
                DENSE,
                Moe(
                    prefix="",
                    router="router.proj",
                    extras=(("router.scale", "hidden_size"), ("router.per_expert_scale", "num_experts")),
                ),
                PER_LAYER,
            )
        ),
    },
    pattern=gemma4_layers,
    norms=(
        *FOUR_NORMS,
        ("post_per_layer_input_norm", lambda config: per_layer(config) > 0),
        ("post_feedforward_layernorm_1", "enable_moe_block"),
        ("post_feedforward_layernorm_2", "enable_moe_block"),
        ("pre_feedforward_layernorm_2", "enable_moe_block"),
    ),
    outside=TABLES,
    scaled_embedding=True,
)

FAMILIES: dict[str, Family] = {
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": replace(GEMMA4, feeds={"dense": DENSE}, norms=FOUR_NORMS, outside=()),
    "gemma3n_text": replace(
        GEMMA4,
        feeds={"dense": Several(pieces=(DENSE, PER_LAYER, LAUREL, ALTUP))},
        pattern=gemma3n_layers,
        norms=(*FOUR_NORMS, "post_per_layer_input_norm"),
        outside=(
            *TABLES,
            ("altup_projections", lambda config: 2 * (config.number("altup_num_inputs") - 1) * config.hidden**2),
        ),
    ),
}
