"""The softmax attention of a block: its module, heads, window and dropout.

Heads are those of the region that tensor parallelism shards, or attributes of the module where it is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from weft.core.model_shape import AttentionShape
from weft.models.tp.heads import ATTRIBUTES, HEAD_DIMS
from weft.models.tp.layout import Region
from weft.models.tp.roles import linear_facts, names_used

ATTENTION = re.compile(r"att", re.IGNORECASE)
CROSS = re.compile(r"cross|encoder_attn", re.IGNORECASE)  # never used without an encoder
_SOFTMAX = {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward", "softmax", "Softmax", "scaled_dot_product_attention"}
_WINDOWS = {"sliding": "sliding_window", "chunked": "attention_chunk_size", "local": "window_size"}


def find_attention(name: str, block: nn.Module, regions: Sequence[Region]) -> list[str]:
    """Modules of softmax attention in a block: regions that shard heads, then others that compute a softmax."""
    found = [one.name for one in regions if one.kind == "attention" and one.heads is not None]
    for path, module in block.named_modules():
        full = f"{name}.{path}"
        is_known = any(f"{full}.".startswith(f"{home}.") for home in found)
        is_named = path and ATTENTION.search(path.rpartition(".")[2] + type(module).__name__)
        is_softmax = bool(names_used(module) & _SOFTMAX) and _has_projections(module)
        if is_named and is_softmax and not is_known and not CROSS.search(path):
            found.append(full.removesuffix(".self"))  # BERT's output projection is beside `self`
    return found


def read_attention(module: nn.Module, region: Region | None, config: Any, *, index: int) -> AttentionShape | None:
    """The attention of block `index`; None if its heads are unknown."""
    latent = _outputs_of(module, ("kv_a_proj_with_mqa", "kv_a_proj"))
    is_grouped = False
    if region is not None and region.heads is not None and region.kv_heads is not None:
        heads, kv_heads, head_dim = region.heads.units, region.kv_heads.units, region.heads.size
        output = next(one for one in region.linears if one.side == "row")
        value_dim = sum(one.features for one in output.inputs) // heads
        is_grouped = not region.kv_heads.may_repeat and not latent and kv_heads != heads
    else:
        counts = _counts(module, config)
        if counts is None:
            return None
        heads, kv_heads, head_dim = counts
        if latent and (query := _outputs_of(module, ("q_b_proj", "q_proj"))):
            head_dim = query // heads
        value_dim = getattr(module, "v_head_dim", head_dim)
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=_window(module, config, index),
        is_latent=latent > 0,
        latent_dim=latent,
        rotary=_is_rotary(module),
        dropout=_dropout(module),
        has_grouped_order=is_grouped,
    )


def _has_projections(module: nn.Module) -> bool:
    return sum(linear_facts("", one) is not None or isinstance(one, nn.Linear) for one in module.modules()) >= 2


def _window(module: nn.Module, config: Any, index: int) -> int | None:
    """Keys per query of a block with a local mask: by the config's list of layers, or of all layers without one."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    kind = kinds[index] if isinstance(kinds, list | tuple) and index < len(kinds) else None
    if kind is None:
        value = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
        is_off = getattr(config, "use_sliding_window", True) is False
        return None if is_off else _positive(value)
    key = next((key for word, key in _WINDOWS.items() if word in str(kind)), None)
    return _positive(getattr(config, key, None)) if key is not None else None


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_rotary(module: nn.Module) -> bool:
    used = names_used(module)
    code = getattr(getattr(type(module).forward, "__wrapped__", type(module).forward), "__code__", None)
    arguments = set(code.co_varnames[: code.co_argcount]) if code is not None else set()
    words = " ".join(used | arguments)
    return "rotary" in words or "rope" in words or "position_embeddings" in arguments


def _counts(module: nn.Module, config: Any) -> tuple[int, int, int] | None:
    """(heads, key-value heads, head size) from attributes of the module or the config."""

    def find(quantity: str) -> int | None:
        for owner in (module, config):
            for name, meaning in ATTRIBUTES.items():
                value = getattr(owner, name, None)
                if meaning == quantity and isinstance(value, int) and value > 0:
                    return value
        return None

    heads = find("heads")
    if heads is None:
        return None
    kv_heads = find("kv_heads") or heads
    for owner in (module, config):
        for name in HEAD_DIMS:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return heads, kv_heads, value
    width = getattr(config, "hidden_size", 0)
    return heads, kv_heads, width // heads


def _outputs_of(module: nn.Module, names: tuple[str, ...]) -> int:
    """Outputs of the first child linear of those names; 0 without one."""
    for name in names:
        child = module._modules.get(name)
        facts = None if child is None else linear_facts(name, child)
        if facts is not None:
            return facts.outputs
    return 0


def _dropout(module: nn.Module) -> float:
    for name in ("attention_dropout", "attn_dropout", "dropout", "attn_pdrop"):
        value = getattr(module, name, None)
        rate = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(rate, float):
            return rate
    return 0.0
