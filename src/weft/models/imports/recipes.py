"""How each parameter of a Hugging Face model is made from one tensor, or two, of a checkpoint of another program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.core.errors import WeightsError

Make = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What names alone do not say."""

    model_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True)
class Recipe:
    """The tensors to read, and a function of them."""

    keys: tuple[str, ...]
    make: Make = lambda value: value


Recipes = dict[str, Recipe]  # by name in the Hugging Face model


def trimmed(rows: int) -> Make:
    """The first rows: vocabularies are padded for tensor parallelism."""
    return lambda value: value[:rows]


def require_all_used(recipes: Recipes, given: set[str], *, program: str, model_type: str) -> None:
    """Refuse a checkpoint with weights that no parameter of the model takes."""
    used = {key for recipe in recipes.values() for key in recipe.keys}
    unused = sorted(given - used)
    if unused:
        raise WeightsError(
            f"the {program} checkpoint has {unused[0]!r} and {len(unused) - 1} more tensors that a {model_type} lacks",
            hint="give the --config of the model that was trained; mixtures of experts are not imported",
        )
