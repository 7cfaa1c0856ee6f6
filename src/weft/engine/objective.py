"""The loss of one micro-batch as a sum and a weight; who divides is the engine alone, once, by the global weight.

An objective never takes a mean: a mean of means over uneven ranks or micro-batches is a different number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100

Batch = Mapping[str, torch.Tensor]


class Objective(Protocol):
    """What is minimised: sum over samples of their losses, and the weight those samples carry."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """How much this batch counts (tokens with a label), as a 0-dim tensor."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss, in float32, with gradients."""
        ...


TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> the summed loss


class CausalLanguageModel:
    """Next-token cross-entropy. Labels are already shifted and carry -100 where there is no loss.

    `token_loss` knows how logits are cut, where they are; None is for whole ones.
    """

    token_loss: TokenLoss | None = None

    def __init__(self, token_loss: TokenLoss | None = None) -> None:
        self.token_loss = token_loss

    def weight(self, batch: Batch) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = _logits(model(**_inputs(batch), use_cache=False))
        return (self.token_loss or token_loss_sum)(logits, batch["labels"])


class TokenClassifier(CausalLanguageModel):
    """The same loss for a plain module that maps input_ids to logits."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return (self.token_loss or token_loss_sum)(_logits(model(batch["input_ids"])), batch["labels"])


def objective_for(model: nn.Module, token_loss: TokenLoss | None = None) -> Objective:
    """Hugging Face models take names and caches; plain modules take the ids."""
    is_hf = hasattr(model, "config") and hasattr(model, "_init_weights")
    return CausalLanguageModel(token_loss) if is_hf else TokenClassifier(token_loss)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The one place where token losses are summed, in float32, for training and evaluation alike."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def _logits(output: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    if not isinstance(logits, torch.Tensor):
        raise TypeError("the model's output has no logits tensor")
    return logits
