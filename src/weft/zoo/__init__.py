"""Model shapes without torch: of named models, of any Hugging Face config.json, of a type with overrides.

Not the models themselves (see models). Everything is loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.model_shape import ModelShape

__all__ = ["config_named", "from_path", "named", "names", "shape_from_type", "shape_of"]


def shape_of(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """The sizes of the causal LM that transformers would build from a parsed config.json."""
    from weft.zoo import shape

    return shape.shape_of(config, name=name)


def shape_from_type(model_type: str, overrides: Mapping[str, Any] | None = None, *, name: str = "") -> ModelShape:
    """A model type with some config values, as [model] of run.toml has it; the others are transformers' defaults."""
    from weft.zoo import shape

    return shape.shape_from_type(model_type, overrides, name=name)


def from_path(path: str | Path, overrides: Mapping[str, Any] | None = None, *, name: str = "") -> ModelShape:
    """Of a config.json, or of a folder that holds one, with the overrides of [model.config]."""
    from weft.zoo import shape

    return shape.from_path(path, overrides, name=name)


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
