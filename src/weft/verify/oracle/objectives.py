"""Losses of [objective] written out from logits, by the formulas of docs/guides/preference.md. Float32, double sums.

Sums over what an objective counts: tokens with a label, or pairs of rows that both have one. Rows 2 k and 2 k + 1 are
the chosen and the rejected answer of pair k.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.verify.oracle.facts import Rows, Tables
from weft.verify.oracle.streams import IGNORED

REFERENCE = "reference"  # of a batch: the log-probability of each row's labels by the initial weights
NOT_INPUTS = ("labels", REFERENCE)


class NextTokenFormula:
    """The cross-entropy: logsumexp of the logits minus the label's logit."""

    what = ""  # of other objectives: their name
    needs_reference = False
    has_scores = False  # the model's head is one row

    def count(self, labels: NDArray[Any]) -> int:
        return int((labels != IGNORED).sum())

    def total(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        return -label_log_probs(logits, batch["labels"]).sum()

    def size(self, logits: torch.Tensor, batch: Rows) -> float:
        """The summed size of what the losses are small differences of, whose rounding they have."""
        return 0.0

    def to(self, dtype: torch.dtype) -> None:
        """Change the format of what the objective computes besides the model."""


class _PairFormula(NextTokenFormula):
    def __init__(self, table: Tables) -> None:
        self.table, self.what = table, str(table["kind"])

    def count(self, labels: NDArray[Any]) -> int:
        return len(_complete(labels))

    def total(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        values = self.of_rows(logits, batch)
        losses = [self.of_pair(values[2 * pair], values[2 * pair + 1]) for pair in _complete(batch["labels"])]
        return torch.stack(losses).sum() if losses else logits.sum() * 0.0

    def of_rows(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        raise NotImplementedError

    def of_pair(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class DpoFormula(_PairFormula):
    def __init__(self, table: Tables) -> None:
        super().__init__(table)
        self.needs_reference = table["reference"] == "initial"
        self.what = f"{table['loss']} dpo"

    def of_rows(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        gains = row_log_probs(logits, batch["labels"])
        if self.needs_reference:
            gains = gains - torch.from_numpy(np.asarray(batch[REFERENCE]))
        return gains / _tokens(batch["labels"]) if self._is_per_token else gains

    def size(self, logits: torch.Tensor, batch: Rows) -> float:
        """Log-probabilities of rows, times the steepest slope of the loss."""
        values, slope = self.of_rows(logits, batch), float(self.table["beta"])
        if self.table["loss"] == "ipo":
            slope = 2.0 * float((values[0::2] - values[1::2]).abs().max()) + 1.0 / slope
        rows = row_log_probs(logits, batch["labels"]).abs()
        sizes = rows / _tokens(batch["labels"]) if self._is_per_token else rows
        return slope * sum(float(sizes[2 * pair : 2 * pair + 2].sum()) for pair in _complete(batch["labels"]))

    @property
    def _is_per_token(self) -> bool:
        given = self.table["per_token"]
        return bool(self.table["loss"] == "ipo" if given is None else given)

    def of_pair(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        beta, smoothing = float(self.table["beta"]), float(self.table["label_smoothing"])
        if self.table["loss"] == "ipo":
            return (chosen - rejected - 1.0 / (2.0 * beta)).square()
        win = torch.sigmoid(beta * (chosen - rejected))
        return -(1.0 - smoothing) * win.log() - smoothing * (1.0 - win).log()


class OrpoFormula(_PairFormula):
    def of_rows(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        return row_log_probs(logits, batch["labels"]) / _tokens(batch["labels"])

    def of_pair(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        odds = [value.exp() / (1.0 - value.exp()) for value in (chosen, rejected)]
        return -chosen - float(self.table["beta"]) * torch.sigmoid((odds[0] / odds[1]).log()).log()


class RewardFormula(_PairFormula):
    has_scores = True

    def of_rows(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        return torch.stack(
            [scores[_last_token(labels), 0].double() for scores, labels in zip(logits, batch["labels"], strict=True)]
        )

    def of_pair(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        centred = float(self.table["center"]) * (chosen + rejected).square()
        return torch.log1p(torch.exp(rejected - chosen)) + centred


class DistillationFormula(NextTokenFormula):
    """`teacher`: transformers' own model in evaluation mode."""

    def __init__(self, table: Tables, teacher: Any) -> None:
        self.table, self._teacher, self.what = table, teacher.eval(), "distillation"

    def total(self, logits: torch.Tensor, batch: Rows) -> torch.Tensor:
        temperature, alpha = float(self.table["temperature"]), float(self.table["alpha"])
        with torch.no_grad():
            given = self._teacher(**inputs_of(batch), use_cache=False).logits.float()
        counted = torch.from_numpy(np.asarray(batch["labels"]) != IGNORED)
        right, own = (torch.log_softmax(each / temperature, dim=-1)[counted].double() for each in (given, logits))
        divergence = (right.exp() * right).sum() - (right.exp() * own).sum()
        return alpha * temperature**2 * divergence + (1.0 - alpha) * super().total(logits, batch)

    def to(self, dtype: torch.dtype) -> None:
        self._teacher.to(dtype)


def objective_of(table: Tables) -> NextTokenFormula:
    kind = table["kind"]
    if kind == "distillation":
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(
            table["teacher"], dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        return DistillationFormula(table, teacher)
    pairs: dict[str, type[_PairFormula]] = {"dpo": DpoFormula, "orpo": OrpoFormula, "reward": RewardFormula}
    return pairs[kind](table) if kind in pairs else NextTokenFormula()


def label_log_probs(logits: torch.Tensor, labels: NDArray[Any]) -> torch.Tensor:
    """The log-probability of each label; zero where there is none."""
    wanted = torch.from_numpy(np.ascontiguousarray(labels))
    chosen = logits.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen - torch.logsumexp(logits, dim=-1)) * (wanted != IGNORED)


def row_log_probs(logits: torch.Tensor, labels: NDArray[Any]) -> torch.Tensor:
    return label_log_probs(logits, labels).double().sum(-1)


def inputs_of(batch: Rows) -> dict[str, torch.Tensor]:
    return {
        key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in batch.items() if key not in NOT_INPUTS
    }


def _complete(labels: NDArray[Any]) -> list[int]:
    """Pairs whose answers both have a token that counts."""
    has = (np.asarray(labels) != IGNORED).any(axis=1)
    return [pair for pair in range(len(has) // 2) if has[2 * pair] and has[2 * pair + 1]]


def _tokens(labels: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy((np.asarray(labels) != IGNORED).sum(axis=1).clip(min=1))


def _last_token(labels: NDArray[Any]) -> int:
    """The place of the last token that counts: labels are shifted, so it follows the last label where there is room."""
    counted = np.flatnonzero(np.asarray(labels) != IGNORED)
    return min(int(counted[-1]) + 1, len(labels) - 1) if len(counted) else 0
