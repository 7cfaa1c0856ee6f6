"""The families: model type -> `Family`, from the tables of this package, each loaded when it is first needed.

Not built by hand elsewhere: a new model type is a new entry in one of these tables and nothing more.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weft.zoo.family import Family

# common types first: a Llama needs the first table alone
_TABLES = (
    "dense", "gpt", "experts", "shared_experts", "latent", "departures", "state_space", "linear_attention", "gemma",
    "recurrences", "compressed", "singular", "zamba", "halves",
)  # fmt: skip


def find(model_type: str) -> Family | None:
    """The family of a type, if it is known."""
    return next((found for name in _TABLES if (found := _table(name).get(model_type)) is not None), None)


def known_types() -> list[str]:
    return sorted(model_type for name in _TABLES for model_type in _table(name))


@cache
def _table(name: str) -> dict[str, Family]:
    families: dict[str, Family] = import_module(f"weft.zoo.families.{name}").FAMILIES
    return families
