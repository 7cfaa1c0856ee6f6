"""`ObjectiveSpec`: what a run minimises, the section [objective] of run.toml. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from weft.core.config import Section

_KEYS_OF = {
    "next_token": (),
    "dpo": ("loss", "beta", "label_smoothing", "reference", "per_token"),
    "orpo": ("beta",),
    "reward": ("center",),
    "distillation": ("teacher", "temperature", "alpha"),
}


class ObjectiveSpec(Section):
    """The loss: of the next token, or of pairs of a chosen and a rejected answer. A loss of pairs is their mean."""

    kind: Literal["next_token", "dpo", "orpo", "reward", "distillation"] = Field(
        default="next_token",
        description="next_token | dpo (direct preference optimisation) | orpo (odds ratio of the answers, without a "
        "reference) | reward (a scalar head scores answers), all with data.format = 'preference' | distillation (the "
        "probabilities of a teacher)",
    )
    loss: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid", description="dpo: sigmoid (-log sigmoid(beta x margin)) | ipo ((margin - 1 / (2 beta))^2)"
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="dpo: how closely the reference is followed | orpo: weight of the odds ratio; rewards are "
        "multiplied by it",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="dpo, sigmoid: the share of pairs taken to be swapped, 0 up to below 0.5"
    )
    reference: Literal["initial", "none"] = Field(
        default="initial",
        description="dpo: initial (log-probabilities of the run's first weights, computed once before the first step "
        "and kept in the run folder) | none (a reference that prefers neither answer)",
    )
    per_token: bool | None = Field(
        default=None,
        description="dpo: divide log-probabilities of an answer by its tokens; absent: true for ipo, false for sigmoid",
    )

    center: float = Field(
        default=0.0, ge=0, description="reward: weight of (chosen + rejected)^2, which keeps rewards around zero"
    )
    teacher: str | None = Field(
        default=None, description="distillation: a Hugging Face folder or hub name with the student's vocabulary"
    )
    temperature: float = Field(
        default=1.0, gt=0, description="distillation: divides the logits of teacher and student before their softmax"
    )
    alpha: float = Field(
        default=0.5, ge=0, le=1, description="distillation: weight of the divergence; the next token has 1 - alpha"
    )

    @property
    def is_of_pairs(self) -> bool:
        return self.kind in ("dpo", "orpo", "reward")

    @property
    def reads_logits(self) -> bool:
        """Whether the loss is computed of logits, so that none is fused with the head."""
        return self.kind != "next_token"

    @property
    def has_reference(self) -> bool:
        return self.kind == "dpo" and self.reference == "initial"

    @property
    def is_per_token(self) -> bool:
        return self.loss == "ipo" if self.per_token is None else self.per_token

    @property
    def rows_per_sample(self) -> int:
        return 2 if self.is_of_pairs else 1

    @model_validator(mode="after")
    def _keys_fit(self) -> ObjectiveSpec:
        default = ObjectiveSpec.model_construct()
        for key in type(self).model_fields:
            if key == "kind" or key in _KEYS_OF[self.kind] or getattr(self, key) == getattr(default, key):
                continue
            kinds = " or ".join(repr(kind) for kind, keys in _KEYS_OF.items() if key in keys)
            raise ValueError(f"{key} needs kind = {kinds}")
        if self.kind == "distillation" and self.teacher is None:
            raise ValueError("kind = 'distillation' needs teacher, a Hugging Face folder or hub name")
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError("label_smoothing is for loss = 'sigmoid'")
        return self
