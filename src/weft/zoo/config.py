"""`Config`: the values of one config.json over its type's defaults, under whichever name a family or a reader uses.

Not transformers' config classes: only what decides sizes, read from data/defaults.json (generated from them).
A value is looked up by its own name, by transformers' alias for the type, then by `SYNONYMS`: the one place for names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from weft.core.errors import BadValueError, ModelError

# the name families use -> the names configs use for the same thing, first found wins
SYNONYMS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("d_model", "n_embd", "dim_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "dim_ff", "dff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "context_length"),
    "hidden_act": ("activation_function", "hidden_activation", "mlp_hidden_act", "activation", "afn", "dense_act_fn"),
    "attention_dropout": ("attn_pdrop", "attention_probs_dropout_prob"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "top_k_experts", "moe_top_k"),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "sliding_window": ("sliding_window_size", "attention_window_size", "window_size"),
}

# keys of older config.json files -> the key that is read instead, where the type has that one and not the old one
LEGACY = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_head_kv": "num_kv_heads",
}

MOST_LAYERS = 10_000

Size = int | str | Callable[["Config"], int]  # a number, the name of a config value, or a formula over the config
Flag = bool | str | Callable[["Config"], bool]


class Config:
    """Read-only; `sized` and `flag` resolve what a family declares. `number` insists, `get` forgives."""

    def __init__(self, model_type: str, values: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self._values = dict(values)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        if value is None:
            value = next(
                (found for name in SYNONYMS.get(key, ()) if (found := self._values.get(name)) is not None), None
            )
        return default if value is None else value

    def number(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"the {self.model_type!r} config has no {key}", hint=f"add {key} to the config, as config.json has it"
            )
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or value < 0:
            raise BadValueError(
                f"{key} of the {self.model_type!r} config is {value!r}, not a whole number", hint=f"correct {key}"
            )
        return int(value)

    def count(self, key: str) -> int:
        """A number of layers: a mistyped one must not become a list of a billion layers."""
        layers = self.number(key)
        if layers > MOST_LAYERS:
            raise BadValueError(
                f"{key} of the {self.model_type!r} config is {layers:,}, more than {MOST_LAYERS:,}",
                hint=f"correct {key}",
            )
        return layers

    def sized(self, size: Size) -> int:
        if isinstance(size, str):
            return self.number(size)
        return size if isinstance(size, int) else int(size(self))

    def flag(self, flag: Flag) -> bool:
        if isinstance(flag, str):
            return bool(self.get(flag, False))
        return flag if isinstance(flag, bool) else bool(flag(self))

    def rate(self, key: str) -> float:
        """A dropout rate; absent is none."""
        return float(self.get(key, 0.0)) if key else 0.0

    def given(self, **overrides: Any) -> Config:
        return Config(self.model_type, self._values | overrides)

    @property
    def hidden(self) -> int:
        return self.number("hidden_size")

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.number("num_key_value_heads") if self.get("num_key_value_heads") is not None else self.heads

    @property
    def head_dim(self) -> int:
        explicit = self.get("head_dim")
        return int(explicit) if explicit is not None else self.hidden // max(self.heads, 1)

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers")


@cache
def type_data(model_type: str) -> dict[str, Any]:
    """{"defaults", "aliases", "nested", "text", "text_only"} of a type; empty where transformers has none.

    data/defaults.json has a type a line, so that one type costs one line and not the whole file.
    """
    start = f"\n{json.dumps(model_type)}: "
    _, found, rest = _defaults_text().partition(start)
    entry: dict[str, Any] = json.loads(rest.partition("\n")[0].rstrip(",")) if found else {}
    return entry


@cache
def _defaults_text() -> str:
    return (Path(__file__).parent / "data" / "defaults.json").read_text(encoding="utf-8")


def with_defaults(model_type: str, values: Mapping[str, Any]) -> Config:
    """`values` over the defaults of the type; an alias writes through to the name it stands for, as in transformers."""
    entry = type_data(model_type)
    aliases: dict[str, str] = entry.get("aliases", {})
    defaults: dict[str, Any] = entry.get("defaults", {})
    renamed = {old: new for old, new in LEGACY.items() if new in defaults and old not in defaults} | aliases
    merged: dict[str, Any] = {}
    for key, value in (*defaults.items(), *values.items()):
        merged[renamed.get(key, key)] = value
    merged |= {name: merged.get(target) for name, target in aliases.items()}
    return Config(model_type, merged)
