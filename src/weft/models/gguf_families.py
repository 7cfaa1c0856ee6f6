"""Families that weft writes as GGUF: their name there, what is stored otherwise, and what GGUF cannot say of them.

A family is here when its tensor names are in the map of the `gguf` package and its reading is known: programs that read
GGUF compute from the architecture's name alone, so a config with another activation or another router is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import WeightsError


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """`fixed`: fields of config.json and the one value that readers assume."""

    arch: str
    permutes: bool = False  # query and key rows: pairs of the rotary embedding side by side, not in halves
    adds_one: bool = False  # norm weights are stored as the factors that they are
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_read_by_transformers: bool = True


_SILU = {"hidden_act": "silu"}
_PLAIN = {**_SILU, "attention_bias": False, "mlp_bias": False}
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}

FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(arch="llama", permutes=True, fixed=_PLAIN),
    "mistral": GgufFamily(arch="llama", permutes=True, fixed=_SILU),
    "mixtral": GgufFamily(arch="llama", permutes=True, fixed=_SILU, is_read_by_transformers=False),
    "qwen2": GgufFamily(arch="qwen2", fixed={**_SILU, "use_sliding_window": False}),
    "qwen3": GgufFamily(arch="qwen3", fixed={**_PLAIN, "use_sliding_window": False}),
    "qwen2_moe": GgufFamily(
        arch="qwen2moe", fixed={**_SILU, **_ALL_SPARSE, "use_sliding_window": False, "norm_topk_prob": False}
    ),
    "qwen3_moe": GgufFamily(
        arch="qwen3moe", fixed={**_PLAIN, **_ALL_SPARSE, "use_sliding_window": False, "norm_topk_prob": True}
    ),
    "gemma2": GgufFamily(
        arch="gemma2", adds_one=True, fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    ),
}

_HINT = "leave --format out, or choose int8, int4 or float8, which every family has"


def family_of(config: Any) -> GgufFamily:
    """The family of a model; raises for one that GGUF files of weft cannot describe."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise WeightsError(f"weft has no GGUF names for {config.model_type} models, only for {known}", hint=_HINT)
    wrong = [(key, value) for key, value in family.fixed.items() if getattr(config, key, value) not in (value, None)]
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        wrong.append(("rope_parameters.rope_type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append(("rope_parameters.partial_rotary_factor", 1.0))
    if wrong:
        key, value = wrong[0]
        raise WeightsError(
            f"readers of GGUF take {config.model_type} models with {key} = {value!r} alone, and this one has another",
            hint=_HINT,
        )
    return family


def notes_of(config: Any) -> list[str]:
    """What a reader may compute otherwise."""
    window = getattr(config, "sliding_window", None)
    if window and config.model_type in ("mistral", "mixtral") and window < config.max_position_embeddings:
        return [f"readers of GGUF ignore the window of {window} tokens: longer texts may differ"]
    return []
