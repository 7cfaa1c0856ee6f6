"""Knowledge distillation: the student follows a frozen teacher's probabilities, beside the next token.

    loss = alpha T^2 KL(teacher_T || student_T) + (1 - alpha) next token        T: temperature of both softmaxes

A sum over tokens with a label, whose number is the weight. Every rank holds the full teacher and gives it its own rows.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.core.objective_spec import ObjectiveSpec
from weft.engine.objective import IGNORED, Batch, StepFigures, logits_of, token_loss_sum


class Distillation:
    """See the module. `teacher`: a Hugging Face model in evaluation mode, on the device of the rows."""

    def __init__(self, spec: ObjectiveSpec, teacher: nn.Module) -> None:
        self.spec, self.teacher = spec, teacher
        self.figures = StepFigures("next_token_loss", "divergence")

    def weight(self, batch: Batch) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = logits_of(model(**inputs, use_cache=False))
        with torch.no_grad():
            wanted = logits_of(self.teacher(**inputs, use_cache=False))
        divergence = self._divergence(logits, wanted, batch["labels"] != IGNORED)
        next_token = token_loss_sum(logits, batch["labels"])
        self.figures.add([next_token, divergence])
        return self.spec.alpha * self.spec.temperature**2 * divergence + (1 - self.spec.alpha) * next_token

    def _divergence(self, logits: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The sum over tokens that count, in float32."""
        own, given = ((values.float() / self.spec.temperature).log_softmax(-1) for values in (logits, wanted))
        return ((given.exp() * (given - own)).sum(-1) * counts).sum()
