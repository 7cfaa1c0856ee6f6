"""Overrides that make a config small without changing the model's structure: depth, widths, heads, experts.

Ratios of heads, the pattern of layer kinds and the size of a head stay as they are.
"""

from __future__ import annotations

from typing import Any

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
INNER_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
KEY_VALUE_KEYS = ("num_key_value_heads", "num_kv_heads")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PER_LAYER_KEYS = ("layer_types", "mlp_layer_types")

SMALL_WIDTH = 64
MIN_EXPERTS = 4


def depth_overrides(config: Any, *, least: int) -> dict[str, Any]:
    """The smallest depth with every kind of layer and a layer for every pipeline stage."""
    key = stored_key(config, LAYER_KEYS)
    if key is None:
        return {}
    depth = getattr(config, key)
    wanted = least
    for kinds_key in PER_LAYER_KEYS:
        kinds = getattr(config, kinds_key, None)
        if isinstance(kinds, list):
            wanted = max(wanted, max(kinds.index(kind) for kind in set(kinds)) + 1)
    wanted = max(wanted, int(getattr(config, "first_k_dense_replace", 0) or 0) + 1)
    if wanted >= depth:
        return {}
    overrides: dict[str, Any] = {key: wanted}
    for kinds_key in PER_LAYER_KEYS:
        if isinstance(getattr(config, kinds_key, None), list):
            overrides[kinds_key] = getattr(config, kinds_key)[:wanted]
    return overrides


def width_factor(config: Any, *, tp: int) -> int:
    """The largest power of two that leaves a width of SMALL_WIDTH and divides both heads and key-value heads.

    Heads that divide evenly over tensor-parallel ranks still do afterwards.
    """
    width = stored_key(config, WIDTH_KEYS)
    counts = [
        getattr(config, key) for key in (stored_key(config, HEAD_KEYS), stored_key(config, KEY_VALUE_KEYS)) if key
    ]
    factor = 1
    while (
        width is not None
        and getattr(config, width) // (factor * 2) >= SMALL_WIDTH
        and all(_stays_even(count, factor * 2, tp=tp) for count in counts)
    ):
        factor *= 2
    return factor


def _stays_even(count: int, factor: int, *, tp: int) -> bool:
    """Whether `factor` divides `count` and the result divides over `tp` ranks as evenly as before.

    Key-value heads that are fewer than ranks are repeated: their number must divide the ranks.
    """
    if count % factor:
        return False
    left = count // factor
    return left % tp == 0 or (count % tp != 0 and (tp % count != 0 or tp % left == 0))


def width_overrides(config: Any, factor: int, *, tp: int, ep: int) -> dict[str, int]:
    """Divide widths and heads by `factor`, which keeps the head size; reduce experts to a few."""
    overrides: dict[str, int] = {}
    for key in (*WIDTH_KEYS, *INNER_KEYS, *HEAD_KEYS, *KEY_VALUE_KEYS):
        value = getattr(config, key, None)
        if _is_own(config, key) and isinstance(value, int) and _stays_even(value, factor, tp=tp):
            overrides[key] = value // factor
    for key in EXPERT_KEYS:
        value = getattr(config, key, None)
        if _is_own(config, key) and isinstance(value, int) and value > MIN_EXPERTS:
            overrides[key] = _few_experts(config, value, ep=ep)
    return {key: value for key, value in overrides.items() if value < getattr(config, key)}


def _few_experts(config: Any, count: int, *, ep: int) -> int:
    """Twice the experts of a token and of ranks at least; equal groups where the router first chooses among groups."""
    top_k = int(getattr(config, "num_experts_per_tok", 1) or 1)
    least = max(MIN_EXPERTS, 2 * top_k, 2 * ep)
    groups, chosen = (int(getattr(config, key, 1) or 1) for key in ("n_group", "topk_group"))
    if groups > 1:  # a group is judged by two of its experts
        return groups * max(2, -(-least // groups), -(-top_k // chosen))
    return -(-least // ep) * ep + count % ep  # spans that are uneven stay so


def stored_key(config: Any, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if _is_own(config, key) and isinstance(getattr(config, key, None), int)), None)


def _is_own(config: Any, key: str) -> bool:
    """Whether the config stores the key itself: an alias of another key would be set twice."""
    return key in config.to_dict()
