"""Named models without torch: their configs and shapes. Shapes of other configs: models/shape.

Everything is loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from typing import Any

from weft.core.model_shape import ModelShape

__all__ = ["config_named", "named", "names"]


def named(name: str) -> ModelShape:
    """Of a well-known model: "llama-3-8b", "meta-llama/Llama-3.1-8B"; case and punctuation do not matter."""
    from weft.zoo import catalogue

    return catalogue.named(name)


def config_named(name: str) -> tuple[str, dict[str, Any]]:
    """The type and the config of a well-known model, as [model] of run.toml has them."""
    from weft.zoo import catalogue

    return catalogue.config_named(name)


def names() -> list[str]:
    """The models `named` knows."""
    from weft.zoo import catalogue

    return catalogue.names()
