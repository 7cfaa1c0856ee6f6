"""The loss that a run minimises, for one process: its formula on full logits, in the precision of those. No engine.

    next token    -log p(label), over tokens with a label
    dpo           of m = log p(chosen) - log p(rejected) - (the same of the reference), over pairs:
                  -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m), or for ipo (m - 1 / (2 beta))^2 of means
    orpo          -a(chosen) - beta log sigmoid(odds(chosen) - odds(rejected)), a: mean log p, odds = a - log(1 - e^a)
    reward        -log sigmoid(r(chosen) - r(rejected)) + center (r(chosen) + r(rejected))^2
    distillation  alpha T^2 KL(teacher || student) + (1 - alpha) next token

Rows 2 k and 2 k + 1 are the chosen and the rejected answer of pair k, which counts if both have a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.core.objective_spec import ObjectiveSpec

IGNORED = -100
REFERENCE = "reference_log_probs"  # of a batch: log-probabilities of its rows by the initial weights

Batch = Mapping[str, torch.Tensor]


class PlainLoss:
    """The next token; other objectives below."""

    has_reference = False

    def count(self, labels: torch.Tensor) -> int:
        """The number that the summed loss of a global batch is divided by, at least 1."""
        return max(1, int((labels != IGNORED).sum()))

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss of the rows, in float32 or better."""
        return _next_token(logits_of(model, batch), batch["labels"])


class _Pairs(PlainLoss):
    """The sum over pairs that count; `pair_losses` is each objective's own."""

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.spec = spec

    def count(self, labels: torch.Tensor) -> int:
        return max(1, int(_counts(labels).sum()))

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = self.pair_losses(logits_of(model, batch), batch)
        return losses[_counts(batch["labels"])].sum()

    def pair_losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


class _Direct(_Pairs):
    def __init__(self, spec: ObjectiveSpec) -> None:
        super().__init__(spec)
        self.has_reference = spec.has_reference

    def pair_losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        spec, gains = self.spec, row_log_probs(logits, batch["labels"])
        if self.has_reference:
            gains = gains - batch[REFERENCE].to(gains)
        if spec.is_per_token:
            gains = gains / _lengths(batch["labels"])
        margin = gains[0::2] - gains[1::2]
        if spec.loss == "ipo":
            return (margin - 0.5 / spec.beta).square()
        wins, loses = F.softplus(-spec.beta * margin), F.softplus(spec.beta * margin)
        return (1 - spec.label_smoothing) * wins + spec.label_smoothing * loses


class _OddsRatio(_Pairs):
    def pair_losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        means = row_log_probs(logits, batch["labels"]) / _lengths(batch["labels"])
        odds = means - torch.log1p(-torch.exp(means.clamp(max=-1e-12)))
        return -means[0::2] + self.spec.beta * F.softplus(odds[1::2] - odds[0::2])


class _Reward(_Pairs):
    def pair_losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The reward is the scalar head's output at the last token, which is the last label."""
        labels, rewards = batch["labels"], []
        for row in range(len(labels)):
            places = (labels[row] != IGNORED).nonzero()
            last = int(places[-1]) + 1 if len(places) else 0
            rewards.append(logits[row, min(last, labels.shape[1] - 1), 0].double())
        chosen, rejected = torch.stack(rewards[0::2]), torch.stack(rewards[1::2])
        return F.softplus(rejected - chosen) + self.spec.center * (chosen + rejected).square()


class _Distillation(PlainLoss):
    def __init__(self, spec: ObjectiveSpec, teacher: nn.Module) -> None:
        self.spec, self.teacher = spec, teacher

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        counted, temperature = batch["labels"] != IGNORED, self.spec.temperature
        with torch.no_grad():
            given = F.softmax(logits_of(self.teacher, batch)[counted] / temperature, dim=-1)
        logits = _raw_logits(model, batch)  # cast once for each term, as an engine does: so are their gradients
        own = F.log_softmax(_wide(logits)[counted] / temperature, dim=-1)
        divergence = torch.special.xlogy(given, given).sum() - (given * own).sum()
        next_token = _next_token(_wide(logits), batch["labels"])
        total: torch.Tensor = self.spec.alpha * temperature**2 * divergence + (1 - self.spec.alpha) * next_token
        return total


def plain_loss(spec: ObjectiveSpec, *, compute: torch.dtype, device: torch.device) -> PlainLoss:
    """The loss of [objective]; a teacher computes in `compute`. Its folder is local, or in the cache."""
    if spec.kind == "distillation":
        return _Distillation(spec, _open_teacher(str(spec.teacher), compute, device))
    pairs: dict[str, type[_Pairs]] = {"dpo": _Direct, "orpo": _OddsRatio, "reward": _Reward}
    return pairs[spec.kind](spec) if spec.kind in pairs else PlainLoss()


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _wide(_raw_logits(model, batch))


def _raw_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key not in ("labels", REFERENCE)}
    # With a cache (the default) Hugging Face models ignore document boundaries in position_ids.
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def row_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the log-probabilities of the labels of each row, in float64: margins are small differences of sums."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(labels.shape).sum(-1, dtype=torch.float64)


def _next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total


def _counts(labels: torch.Tensor) -> torch.Tensor:
    has_labels = (labels != IGNORED).any(-1)
    return has_labels[0::2] & has_labels[1::2]


def _lengths(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum(-1).clamp(min=1)


def _open_teacher(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from weft.zoo.hub import model_folder

    teacher: Any = AutoModelForCausalLM.from_pretrained(
        model_folder(name, weights=True), dtype=dtype, trust_remote_code=False
    )
    opened: nn.Module = teacher.eval().to(device)
    return opened
