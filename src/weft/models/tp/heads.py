"""Heads of an attention module: their number and size, the attributes that hold them, and obstacles to sharding.

    heads = inputs of the output projection / value_dim      kv_heads = features of the keys / key_dim

Counts come from shapes; the module's attributes must agree, or it is declined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.models.tp.layout import Quantity, Segment
from weft.models.tp.roles import DeclinedError, Site, names_used
from weft.zoo.tensor_exceptions import REPLICATED_ATTENTION, REPLICATED_ATTENTION_WHERE

HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_per_head")
ATTRIBUTES: dict[str, Quantity] = {
    "num_heads": "heads", "n_head": "heads", "n_heads": "heads", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "num_kv_heads": "kv_heads", "kv_heads": "kv_heads",
    "num_key_value_groups": "heads_per_kv", "num_kv_groups": "heads_per_kv",
    "embed_dim": "width", "hidden_size": "width", "split_size": "width", "all_head_size": "width", "inner_dim": "width",
    "d_model_size": "width", "kv_dim": "kv_width",
}  # fmt: skip
OTHER_STATES = "it is cross-attention"
# tables over positions, equal for all heads
_SHARED_BUFFERS = {"bias", "masked_bias", "inv_freq", "original_inv_freq", "embed_positions"}


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """The counts of one attention module."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    repeats: bool = True  # key-value heads may be held by several ranks

    @property
    def query(self) -> Segment:
        return Segment(units=self.heads, size=self.key_dim)

    @property
    def key(self) -> Segment:
        return Segment(units=self.kv_heads, size=self.key_dim, may_repeat=self.repeats)

    @property
    def value(self) -> Segment:
        return Segment(units=self.kv_heads, size=self.value_dim, may_repeat=self.repeats)

    @property
    def output(self) -> Segment:
        return Segment(units=self.heads, size=self.value_dim)


def head_dim_of(site: Site, *, default: int) -> int:
    """The head size: the module's attribute, or `default` features divided by the number of heads."""
    for name in HEAD_DIMS:
        value = getattr(site.module, name, None)
        if isinstance(value, int):
            return value
    counts = [getattr(site.module, name, None) for name, what in ATTRIBUTES.items() if what == "heads"]
    count = next((value for value in counts if isinstance(value, int)), None)
    if not count or default % count:
        raise DeclinedError("its number of heads is unknown")
    return default // count


def attributes_of(site: Site, counts: HeadCounts) -> dict[str, Quantity]:
    """Attributes with sizes that the forward may read; one that contradicts the shapes declines the module."""
    expected = _expected(counts)
    used = names_used(site.module)
    found: dict[str, Quantity] = {}
    for name, quantity in ATTRIBUTES.items():
        value = site.module.__dict__.get(name)
        if quantity in ("width", "kv_width"):
            if name in used and value == expected[quantity]:
                found[name] = quantity
        elif isinstance(value, int):
            if value != expected[quantity]:
                raise DeclinedError(f"its {name} is {value}, but its projections have {expected[quantity]}")
            found[name] = quantity
        elif "config" in used and name in used and quantity != "heads_per_kv":
            value = getattr(site.module.__dict__.get("config"), name, None)
            if value == expected[quantity]:
                found[f"config.{name}"] = quantity
    return found


def _expected(counts: HeadCounts) -> dict[Quantity, int]:
    return {
        "heads": counts.heads,
        "kv_heads": counts.kv_heads,
        "heads_per_kv": counts.heads // counts.kv_heads if counts.kv_heads else 0,
        "width": counts.query.features,
        "kv_width": counts.key.features,
    }


def require_divisible(site: Site) -> None:
    """Decline heads that a known trait of the family, or a buffer of the module, makes indivisible."""
    reason = REPLICATED_ATTENTION.get(site.model_type)
    for model_type, field, why in REPLICATED_ATTENTION_WHERE:
        if site.model_type == model_type and getattr(site.config, field, None):
            reason = why
    if reason is not None:
        raise DeclinedError(reason)
    _require_own_hidden_states(site)
    _require_shared_buffers(site)


def _require_own_hidden_states(site: Site) -> None:
    words = site.name.rpartition(".")[2]
    if "cross" in words or "encoder_attn" in words or getattr(site.module, "is_cross_attention", False) is True:
        raise DeclinedError(OTHER_STATES)


def _require_shared_buffers(site: Site) -> None:
    """Decline buffers and bare tensors with one entry per head (slopes, decays): a rank's heads cannot use them."""
    for name, _ in site.module.named_buffers():
        if name.rpartition(".")[2] not in _SHARED_BUFFERS:
            raise DeclinedError(f"its buffer {name} may have entries per head")
    for module in site.module.modules():
        for name, value in _tensors_kept(module):
            raise DeclinedError(f"its tensor {name} ({tuple(value.shape)}) may have entries per head")


def _tensors_kept(module: nn.Module) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
