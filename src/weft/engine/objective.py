"""The loss of one micro-batch as a sum and a weight. The engine alone divides, once, by the global weight.

An objective never takes a mean: a mean of means over uneven ranks or micro-batches is a different number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100

Batch = Mapping[str, torch.Tensor]


class Objective(Protocol):
    """The loss to minimise: the sum over samples of their losses, and the weight of those samples."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """The weight of this batch (tokens with a label), as a 0-dim tensor."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss, in float32, with gradients."""
        ...


class StepFigures:
    """StepFigures that an objective reports beside its loss: sums over a step, divided by the weight of the step.

    An objective with an attribute `figures` adds to them in `loss_sum`; evaluations do not count. The figure "tokens"
    is not divided: the tokens with a loss, where the weight counts something else.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._sums: torch.Tensor | None = None

    def add(self, values: Sequence[torch.Tensor]) -> None:
        """Add one sum over samples per name."""
        summed = torch.stack([value.detach().double() for value in values])
        self._sums = summed if self._sums is None else self._sums + summed

    def clear(self) -> None:
        self._sums = None

    def take(self, device: torch.device) -> torch.Tensor:
        """The sums since the last call."""
        found, self._sums = self._sums, None
        return torch.zeros(len(self.names), dtype=torch.float64, device=device) if found is None else found


def figures_of(objective: Objective) -> StepFigures:
    """The figures that the objective reports; none for most."""
    found: StepFigures = getattr(objective, "figures", None) or StepFigures()
    return found


class ModelLoss(Protocol):
    """A loss computed by the model's head: inside `given(labels)` a call of the model returns the summed loss."""

    def given(self, labels: torch.Tensor) -> AbstractContextManager[None]: ...


TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> the summed loss


class ShardedLoss(Protocol):
    """A `TokenLoss` of logits that are sharded by vocabulary."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, /) -> torch.Tensor: ...

    def of_tokens(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each token, zero without a label."""
        ...


class CausalLanguageModel:
    """Next-token cross-entropy. Labels are already shifted and carry -100 where there is no loss.

    `token_loss`: the loss of sharded logits; None for full ones. `model_loss`: the model computes the loss.
    """

    token_loss: TokenLoss | None = None  # of the class: a user's subclass need not call the constructor
    model_loss: ModelLoss | None = None

    def __init__(self, token_loss: TokenLoss | None = None, model_loss: ModelLoss | None = None) -> None:
        self.token_loss = token_loss
        self.model_loss = model_loss

    def weight(self, batch: Batch) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if self.model_loss is not None:
            with self.model_loss.given(batch["labels"]):
                loss: torch.Tensor = model(**_inputs(batch), use_cache=False)
                return loss
        logits = logits_of(model(**_inputs(batch), use_cache=False))
        return (self.token_loss or token_loss_sum)(logits, batch["labels"])


class TokenClassifier(CausalLanguageModel):
    """The same loss for a plain module that maps input_ids to logits."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return (self.token_loss or token_loss_sum)(logits_of(model(batch["input_ids"])), batch["labels"])


def objective_for(
    model: nn.Module, token_loss: TokenLoss | None = None, model_loss: ModelLoss | None = None
) -> Objective:
    """Hugging Face models take keyword arguments and caches; plain modules take the ids."""
    return CausalLanguageModel(token_loss, model_loss) if is_hugging_face(model) else TokenClassifier(token_loss)


def is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "_init_weights")


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of token losses, in float32, for training and evaluation alike."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def logits_of(output: Any) -> Any:
    """A tensor, or a stand-in for one (see `head_loss`)."""
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise TypeError("the model's output has no logits tensor")
    return logits
