"""The plain model of a run with low-rank adapters: its weights are W + s B A, with no module for the adapter.

forward     transformers' own model with W + s B A in the place of W, s = alpha / rank (rslora: alpha / sqrt(rank))
backward    dA = s B' dW, dB = s dW A', by the chain rule from the gradient dW of the plain model
initial     A uniform in +-1/sqrt(inputs), as PEFT draws it, B zero
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch

from weft.verify.oracle.facts import Tables, Tensors
from weft.verify.oracle.model import Batch, PlainModel
from weft.verify.oracle.objectives import NextTokenFormula
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle adapter", 12
A, B = ".lora_A.weight", ".lora_B.weight"
IN_CODES = ("int8", "nf4")  # bases whose linear layers are stored in codes; W has the values of the codes
MERGE_TOLERANCE = 1e-6  # the sum is rounded to float32 once
ERRORS = 8.0  # standard errors of the deviation of a uniform draw


def is_factor(name: str) -> bool:
    return name.endswith((A, B))


def without_factors(weights: Tensors) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if not is_factor(name)}


class AdaptedPlainModel(PlainModel):
    """See the module. `adapter` is the run's table."""

    def __init__(self, config: Any, adapter: Tables, objective: NextTokenFormula | None = None) -> None:
        super().__init__(config, objective)
        rank, alpha = int(adapter["rank"]), float(adapter["alpha"])
        self.scale = alpha / (math.sqrt(rank) if adapter["rslora"] else rank)
        self._also, self._drops = tuple(adapter["train_also"]), float(adapter["dropout"]) > 0
        self._factors: dict[str, torch.Tensor] = {}

    def put(self, weights: Tensors) -> None:
        self._factors = {name: value for name, value in weights.items() if is_factor(name)}
        merged = without_factors(weights)
        for linear in self._linears():
            name = f"{linear}.weight"
            product = self.scale * (self._of(linear, B) @ self._of(linear, A))
            merged[name] = merged[name].double() + self._as_stored(linear, product)
        super().put(merged)

    def gradients(self, batch: Batch, *, chunk_rows: int, z_loss: float = 0.0) -> dict[str, torch.Tensor]:
        plain = super().gradients(batch, chunk_rows=chunk_rows, z_loss=z_loss)
        found = {name: value for name, value in plain.items() if any(fnmatchcase(name, one) for one in self._also)}
        for linear in self._linears():
            if f"{linear}.weight" not in plain:
                continue
            whole = self._as_stored(linear, plain[f"{linear}.weight"].double())
            found[linear + A] = (self.scale * self._of(linear, B).T @ whole).float()
            found[linear + B] = (self.scale * whole @ self._of(linear, A).T).float()
        return found

    def at_rest(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The value as a frozen weight of that dtype has it; trained ones are in float32."""
        is_trained = is_factor(name) or any(fnmatchcase(name, one) for one in self._also)
        return value if is_trained else value.to(dtype).to(value.dtype)

    def is_random(self, batch: Batch) -> bool:
        return self._drops or super().is_random(batch)

    def check_initial(self, initial: Tensors) -> Check:
        """Check the initial factors, where the run does not continue an adapter."""
        factors = {name: value for name, value in initial.items() if is_factor(name)}
        for name, value in factors.items():
            bound = 0.0 if name.endswith(B) else 1 / math.sqrt(value.shape[1])
            expected, error = bound / math.sqrt(3), ERRORS * bound / math.sqrt(value.numel())
            found = value.double().square().mean().sqrt().item()
            if value.abs().max() > bound or not abs(found - expected) <= error:
                right = f"values within {bound:.4g}, deviation {expected:.4g}"
                finding = Finding(rule=RULE, parameter=name, expected=right, found=f"deviation {found:.4g}")
                return Check.failed(NAME, finding)
        return Check.passed(NAME, f"{len(factors)} factors: A as PEFT draws it, B zero; base weights W + s B A")

    def wrong_merge(self, name: str, found: torch.Tensor, weights: Tensors) -> bool:
        """Whether an exported weight is not W + s B A of the trained `weights`, within float32 rounding."""
        self._factors = {key: value for key, value in weights.items() if is_factor(key)}
        linear, right = name.removesuffix(".weight"), weights[name].double()
        if linear + A not in weights:
            return not torch.equal(found, weights[name].float())
        right = right + self._as_stored(linear, self.scale * (self._of(linear, B) @ self._of(linear, A)))
        return not torch.allclose(found.double(), right, rtol=MERGE_TOLERANCE, atol=MERGE_TOLERANCE)

    def _linears(self) -> Iterator[str]:
        return (name.removesuffix(A) for name in self._factors if name.endswith(A))

    def _of(self, linear: str, factor: str) -> torch.Tensor:
        return self._factors[linear + factor].double()

    def _as_stored(self, linear: str, matrix: torch.Tensor) -> torch.Tensor:
        is_transposed = type(self.model.get_submodule(linear)).__name__ == "Conv1D"
        return matrix.T if is_transposed else matrix
