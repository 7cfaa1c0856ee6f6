"""Objectives of pairs: rows 2 k and 2 k + 1 of a batch are the chosen and the rejected answer of pair k.

    log p(row)  the sum of the log-probabilities of its labels (per_token: over their number)
    margin      (log p(chosen) - log p(rejected)) - (the same of the reference)
    dpo         -(1 - s) log sigmoid(beta margin) - s log sigmoid(-beta margin)         s: label_smoothing
    ipo         (margin - 1 / (2 beta))^2
    orpo        -a(chosen) - beta log sigmoid(odds(chosen) - odds(rejected))     odds = a - log(1 - exp a), a = log p
                over the number of labels
    reward      -log sigmoid(r(chosen) - r(rejected)) + center (r(chosen) + r(rejected))^2     r: a scalar head's output
                at the last token of the row

Log-probabilities of the reference come with the batch (`engine/reference.py`). The loss is a sum over pairs and the
weight their number, so the engine's division makes it a mean over the pairs of the global batch in every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.core.errors import BatchError, NotBuiltError
from weft.core.objective_spec import ObjectiveSpec
from weft.core.plan import Plan
from weft.engine.objective import IGNORED, Batch, ShardedLoss, StepFigures, is_hugging_face, logits_of

REFERENCE = "reference_log_probs"  # of a batch: one number per row
_REWARDS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


class RowLogProbs:
    """Log-probabilities of rows, of full logits or of logits that tensor parallelism shards."""

    def __init__(self, model: nn.Module, token_loss: ShardedLoss | None) -> None:
        self._takes_ids_alone = not is_hugging_face(model)
        self._token_loss = token_loss

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The sums [rows] over the labels, in float64: margins are small differences of large sums."""
        logits, labels = self._logits(model, batch), batch["labels"]
        if self._token_loss is not None:
            return -self._token_loss.of_tokens(logits, labels).sum(-1, dtype=torch.float64)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(labels.shape).sum(-1, dtype=torch.float64)

    def _logits(self, model: nn.Module, batch: Batch) -> Any:
        if self._takes_ids_alone:
            return logits_of(model(batch["input_ids"]))
        inputs = {key: value for key, value in batch.items() if key not in ("labels", REFERENCE)}
        return logits_of(model(**inputs, use_cache=False))


class LastTokenRewards(RowLogProbs):
    """Outputs of a scalar head at the last token of each row: labels are shifted, so it follows the last label."""

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        scores, labels = self._logits(model, batch), batch["labels"]
        places = torch.arange(labels.shape[1], device=labels.device)
        last = torch.where(labels != IGNORED, places + 1, 0).amax(-1).clamp(max=labels.shape[1] - 1)
        found: torch.Tensor = scores[torch.arange(len(labels), device=labels.device), last, 0]
        return found.double()


class PairObjective:
    """What all objectives of pairs share: `pair_losses` is theirs. The engine calls `bind` before the first step."""

    figures: StepFigures
    log_probs: RowLogProbs

    def bind(self, model: nn.Module, plan: Plan, token_loss: ShardedLoss | None) -> None:
        """The model and the loss of sharded logits, if tensor parallelism shards them."""
        for has, what in (
            (plan.never_flushes, f"pipeline.schedule = {plan.pipeline.schedule!r}"),
            (plan.mesh.cp > 1, "context parallelism (mesh.cp > 1)"),
            (plan.mesh.tp > 1 and plan.tensor_parallel.mode != "1d", "a tensor-parallel grid"),
        ):
            if has:
                raise NotBuiltError(
                    f"this version of weft does not train pairs with {what}",
                    hint="use dp_replicate, dp_shard, tp, ep or a pipeline that flushes",
                )
        self.log_probs = RowLogProbs(model, token_loss)

    def weight(self, batch: Batch) -> torch.Tensor:
        return _counted_pairs(batch["labels"]).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        counts = _counted_pairs(batch["labels"])
        found = self.log_probs(model, batch)
        losses, figures = self.pair_losses(found, batch)
        labels = (batch["labels"] != IGNORED).sum()
        with torch.no_grad():
            self.figures.add([labels, *((value * counts).sum() for value in figures)])
        return (losses * counts).sum().float()

    def pair_losses(self, log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of each pair, and its figures in the order of `figures.names` after the tokens."""
        raise NotImplementedError


class DirectPreference(PairObjective):
    """Direct preference optimisation, with a reference or without."""

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.spec = spec
        self.figures = StepFigures("tokens", *_REWARDS)

    def pair_losses(self, log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        spec = self.spec
        gains = log_probs
        if spec.has_reference:
            if REFERENCE not in batch:
                raise BatchError(
                    f"objective.reference = 'initial' needs {REFERENCE!r} in the batch, a number per row",
                    hint="weft.train adds it; with weft.Engine use row_log_probs of weft.engine.reference",
                )
            gains = log_probs - batch[REFERENCE].to(log_probs)
        if spec.is_per_token:
            gains = gains / (batch["labels"] != IGNORED).sum(-1).clamp(min=1)
        chosen, rejected = gains[0::2], gains[1::2]
        return _pair_loss(chosen - rejected, spec), _rewards(chosen * spec.beta, rejected * spec.beta)


class OddsRatio(PairObjective):
    """The likelihood of the chosen answer, and the ratio of the odds of both, by their mean log-probabilities."""

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.spec = spec
        self.figures = StepFigures("tokens", "chosen_loss", *_REWARDS)

    def pair_losses(self, log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        means = log_probs / (batch["labels"] != IGNORED).sum(-1).clamp(min=1)
        chosen, rejected = means[0::2], means[1::2]
        ratio = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
        losses = -chosen - self.spec.beta * F.logsigmoid(ratio)
        return losses, [-chosen, *_rewards(chosen * self.spec.beta, rejected * self.spec.beta)]


class PairwiseReward(PairObjective):
    """The likelihood, after Bradley and Terry, that the chosen answer wins by its reward."""

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.spec = spec
        self.figures = StepFigures("tokens", *_REWARDS)

    def bind(self, model: nn.Module, plan: Plan, token_loss: ShardedLoss | None) -> None:
        super().bind(model, plan, token_loss)
        self.log_probs = LastTokenRewards(model, token_loss)

    def pair_losses(self, log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        chosen, rejected = log_probs[0::2], log_probs[1::2]
        losses = -F.logsigmoid(chosen - rejected) + self.spec.center * (chosen + rejected).square()
        return losses, _rewards(chosen, rejected)


def _log_of_rest(log_prob: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(log_prob)), finite where an answer is certain (and for rows without labels, which do not count)."""
    return torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))


def _pair_loss(margin: torch.Tensor, spec: ObjectiveSpec) -> torch.Tensor:
    if spec.loss == "ipo":
        return (margin - 1 / (2 * spec.beta)).square()
    smoothing, scaled = spec.label_smoothing, spec.beta * margin
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> list[torch.Tensor]:
    return [chosen, rejected, chosen - rejected, (chosen > rejected).float()]


def _counted_pairs(labels: torch.Tensor) -> torch.Tensor:
    """1 for pairs whose two answers have a token that counts, else 0: rows that fill the last batch of the data."""
    if len(labels) % 2:
        raise BatchError(
            f"{len(labels)} rows are no pairs: rows 2 k and 2 k + 1 are the answers of pair k",
            hint="choose pipeline.microbatches so that every micro-batch has an even number of rows",
        )
    return (labels != IGNORED).any(-1).view(-1, 2).all(-1)


def objective_of(spec: ObjectiveSpec) -> PairObjective | None:
    """The objective of [objective]; None for the loss of the next token, which the engine makes."""
    kinds: dict[str, Callable[[ObjectiveSpec], PairObjective]] = {
        "dpo": DirectPreference,
        "orpo": OddsRatio,
        "reward": PairwiseReward,
    }
    return kinds[spec.kind](spec) if spec.kind in kinds else None
