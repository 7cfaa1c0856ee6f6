"""The experts of a model: modules whose parameters have one row per expert, and why others stay replicated.

A description for any degree; it changes nothing. `finder` fills it from a model's structure, `engine.ep` applies it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A module `forward(hidden [tokens, features], index [tokens, k], weights [tokens, k])`, arguments by position."""

    name: str  # of the module
    num_experts: int
    top_k: int | None  # experts per token; None if only the forward knows
    parameters: tuple[str, ...]  # [experts, ...]
    shared: tuple[str, ...] = ()  # parameters that every expert uses: each rank has a partial sum of their gradient
    counts: tuple[str, ...] = ()  # attributes of the module that hold the number of experts


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """All such modules of a model. `declined`: modules that hold experts and stay replicated, with the reason."""

    layers: tuple[ExpertLayer, ...]
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The modules."""
        return tuple(layer.name for layer in self.layers)

    @property
    def why_not_divided(self) -> str:
        """Why the experts cannot be divided over ranks; "" if they can."""
        if not self.layers:
            return next(iter(self.declined.values()), "it has none")
        # a module of experts is sharded over the ranks with the same experts alone
        shared = next((name for layer in self.layers for name in layer.shared), None)
        return f"all of them use {shared}" if shared is not None else ""

    def within(self, parameters: Container[str]) -> ExpertLayout:
        """Restrict the layout to these parameters (a pipeline stage's)."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer.parameters[0] in parameters))
