"""`RouterTotals`: the sums of one step over all ranks, and the figures that metrics show.

load       tokens of an expert over the mean of its layer: 1 is balanced
entropy    of a layer's shares, over its largest possible value: 1 is balanced
dropped    choices over the capacity of their expert, over all choices
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.records import ExpertLoads
from weft.core.run_spec import RouterSpec
from weft.engine.measure.host_copy import HostCopy
from weft.engine.router.sums import choices_of, drops_of, probabilities_of, row_size, squares_of
from weft.models.ep.layout import ExpertLayer


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterTotals:
    """`values` and `num_tokens` may still be on the device; the methods wait for them."""

    layers: tuple[ExpertLayer, ...]
    spec: RouterSpec
    values: HostCopy
    num_tokens: HostCopy

    def figures(self) -> dict[str, Any]:
        """Fields of a `StepRecord`."""
        choices = list(self.choices().values())
        loads = [counts.max() / counts.mean().clamp(min=1e-9) for counts in choices]
        found: dict[str, Any] = {
            "expert_load": _mean(loads),
            "expert_load_max": max(map(float, loads)),
            "expert_entropy": _mean([_entropy(counts) for counts in choices]),
            "dead_experts": sum(int((counts == 0).sum()) for counts in choices),
        }
        if self.spec.capacity_factor:
            dropped = zip(self.drops().values(), choices, strict=True)
            found["dropped_share"] = _mean([drops / counts.sum().clamp(min=1) for drops, counts in dropped])
        if self.spec.has_losses:
            rows = [(row, layer.num_experts) for layer, row in self._rows()]
            is_pooled = self.spec.balance_over == "transformers"
            balances = [self._balance(row, size) for row, size in rows]
            found["router_balance_loss"] = self._pooled_balance(rows) if is_pooled else _mean(balances)
            found["router_z_loss"] = _mean([squares_of(row, size) / self._tokens for row, size in rows])
        return found

    def loads(self, step: int) -> ExpertLoads:
        choices = {name: counts.tolist() for name, counts in self.choices().items()}
        dropped = list(self.drops().values()) if self.spec.capacity_factor else None
        return ExpertLoads.of(step, choices, dropped=dropped)

    def choices(self) -> dict[str, Tensor]:
        """Choices of each expert, by layer."""
        return {layer.name: choices_of(row, layer.num_experts) for layer, row in self._rows()}

    def drops(self) -> dict[str, int]:
        """Choices over the capacity of their expert, by layer."""
        return {layer.name: int(drops_of(row, layer.num_experts)) for layer, row in self._rows()}

    @property
    def _tokens(self) -> float:
        return max(1.0, float(self.num_tokens.wait()))

    def _rows(self) -> list[tuple[ExpertLayer, Tensor]]:
        sizes = [row_size(layer.num_experts) for layer in self.layers]
        return list(zip(self.layers, torch.split(self.values.wait(), sizes), strict=True))

    def _balance(self, row: Tensor, num_experts: int) -> Tensor:
        """With this step's own shares: 1 is balanced."""
        choices = choices_of(row, num_experts)
        shares = choices / choices.sum().clamp(min=1)
        return torch.sum(shares * probabilities_of(row, num_experts)) * (num_experts / self._tokens)

    def _pooled_balance(self, rows: Sequence[tuple[Tensor, int]]) -> float:
        """Over all layers at once, as transformers' own loss: the number of experts per token is balanced."""
        choices = torch.stack([choices_of(row, size) for row, size in rows]).sum(0)
        shown = torch.stack([probabilities_of(row, size) for row, size in rows]).sum(0)
        return float(torch.sum(choices * shown)) * len(choices) / (self._tokens * len(rows)) ** 2


def _entropy(counts: Tensor) -> Tensor:
    shares = counts / counts.sum().clamp(min=1)
    return torch.sum(torch.special.entr(shares)) / math.log(max(2, len(counts)))


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean()) if values else 0.0
