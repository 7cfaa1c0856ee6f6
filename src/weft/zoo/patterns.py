"""Which layer is of which kind: sliding or full, dense or expert, recurrent or attention. Pure functions of the config.

Not the pieces themselves: these give their names. A config that lists its layers (`layer_types`) overrules any rule.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.core.errors import ModelError
from weft.zoo.config import Config, Flag
from weft.zoo.family import Layer, Pattern

Names = Callable[[Config], list[str]]

# the names of transformers' layer types, old and new -> the name of a family's piece
_PIECES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "linear_attention": "linear",
    "mamba": "linear",
    "dense": "dense",
    "sparse": "moe",
}


def layered(mixers: Names, feeds: Names | None = None) -> Pattern:
    """The pattern whose layer i has the i-th mixer and the i-th feed; feeds are dense unless said."""

    def pattern(config: Config) -> list[Layer]:
        return [
            Layer(mixer, feed) for mixer, feed in zip(mixers(config), (feeds or always("dense"))(config), strict=True)
        ]

    return pattern


def always(name: str) -> Names:
    return lambda config: [name] * config.layers


def listed(default: Names, *, key: str = "layer_types") -> Names:
    """What the config lists under `key`, else the rule of the family."""

    def names(config: Config) -> list[str]:
        given = config.get(key)
        if given is None:
            return default(config)
        if len(given) < config.layers:
            raise ModelError(
                f"{key} of the {config.model_type!r} config names {len(given)} layers of {config.layers}",
                hint=f"give {key} one entry a layer, or leave it out",
            )
        return [_PIECES.get(str(name), str(name)) for name in given[: config.layers]]

    return names


def windowed(config: Config) -> list[str]:
    """Every layer slides where a window is set."""
    return ["sliding" if config.get("sliding_window") else "full"] * config.layers


def sliding_except_every(*, key: str, period: int) -> Names:
    """Full attention in every `period`-th layer, the rest slide."""

    def names(config: Config) -> list[str]:
        step = int(config.get(key, period)) if key else period
        return ["sliding" if (index + 1) % step else "full" for index in range(config.layers)]

    return names


def full_every(period: int) -> Names:
    """Full attention in layers 0, period, 2 x period, ...; the rest slide."""
    return lambda config: ["sliding" if index % period else "full" for index in range(config.layers)]


def sliding_from_layer(config: Config) -> list[str]:
    """Qwen: from layer max_window_layers on, where windows are switched on."""
    start = int(config.get("max_window_layers", config.layers))
    is_on = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    return ["sliding" if is_on and index >= start else "full" for index in range(config.layers)]


def period(name: str, other: str, *, every: str, offset: str = "", default: int = 0) -> Names:
    """`name` where (layer - offset) is a multiple of the period, `other` elsewhere."""

    def names(config: Config) -> list[str]:
        step, shift = int(config.get(every, default)), int(config.get(offset, 0)) if offset else 0
        return [name if (index - shift) % step == 0 else other for index in range(config.layers)]

    return names


def moe_from(key: str, *, default: int = 0) -> Names:
    """The first layers are dense, as many as the config says; experts follow."""
    return lambda config: [
        "dense" if index < int(config.get(key, default)) else "moe" for index in range(config.layers)
    ]


def moe_by_step(config: Config) -> list[str]:
    """Qwen: experts in every decoder_sparse_step-th layer that is not listed as dense."""
    dense, step = set(config.get("mlp_only_layers", [])), int(config.get("decoder_sparse_step", 1))
    has_experts = config.number("num_experts") > 0
    return [
        "moe" if has_experts and index not in dense and (index + 1) % step == 0 else "dense"
        for index in range(config.layers)
    ]


def moe_if(flag: Flag) -> Names:
    return lambda config: ["moe" if config.flag(flag) else "dense"] * config.layers


def moe_listed(key: str, default: Names) -> Names:
    """Experts in the layers whose numbers the config lists."""

    def names(config: Config) -> list[str]:
        given = config.get(key)
        if given is None:
            return default(config)
        return ["moe" if index in set(given) else "dense" for index in range(config.layers)]

    return names
