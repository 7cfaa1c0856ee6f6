"""Bugs of objectives on the side of the plan alone: context managers that change the engine, on one rank or all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import weft.engine.preference as preference
import weft.verify.session
from weft.data.loader import Loader
from weft.engine.distillation import Distillation
from weft.engine.preference import REFERENCE, DirectPreference, PairObjective

Bug = AbstractContextManager[None]


@contextmanager
def changed(owner: Any, name: str, make: Any, *, rank: int | None = None) -> Iterator[None]:
    """`owner.name` is make(original), on one rank or on all."""
    original = getattr(owner, name)
    is_here = rank is None or dist.get_rank() == rank
    with patch.object(owner, name, make(original) if is_here else original):
        yield


def answers_swapped_on_one_rank() -> Bug:
    def make(original: Any) -> Any:
        def pair_losses(self: Any, log_probs: torch.Tensor, batch: Any) -> Any:
            def swap(rows: torch.Tensor) -> torch.Tensor:
                return rows.view(-1, 2).flip(1).reshape(-1)

            swapped = {**batch, REFERENCE: swap(batch[REFERENCE])}
            return original(self, swap(log_probs), swapped)

        return pair_losses

    return changed(DirectPreference, "pair_losses", make, rank=1)


def beta_is_ignored() -> Bug:
    return changed(preference, "_pair_loss", lambda original: lambda margin, spec: original(margin / spec.beta, spec))


def reference_of_other_rows() -> Bug:
    return changed(
        weft.verify.session, "row_log_probs", lambda original: lambda *given: original(*given).roll(2), rank=1
    )


def loop_reads_the_reference_of_other_pairs() -> Bug:
    def make(original: Any) -> Any:
        def column(self: Any, name: str, values: Any, rows: Any, filler: Any) -> Any:
            return original(self, name, values, rows, filler)[::-1].copy()

        return column

    return changed(Loader, "_column", make, rank=1)


def mean_over_the_pairs_of_a_microbatch() -> Bug:
    def make(original: Any) -> Any:
        def loss_sum(self: Any, model: Any, batch: Any) -> torch.Tensor:
            pairs = max(1, int(self.weight(batch)))
            return original(self, model, batch) / pairs * (len(batch["labels"]) // 2)

        return loss_sum

    return changed(PairObjective, "loss_sum", make)


def divided_by_tokens() -> Bug:
    return changed(PairObjective, "weight", lambda _: lambda self, batch: (batch["labels"] != -100).sum())


def temperature_is_not_squared() -> Bug:
    def make(original: Any) -> Any:
        def divergence(self: Any, *given: Any) -> torch.Tensor:
            return original(self, *given) / self.spec.temperature

        return divergence

    return changed(Distillation, "_divergence", make)


def teacher_is_in_training_mode() -> Bug:
    def make(original: Any) -> Any:
        def build(self: Any, spec: Any, teacher: Any) -> None:
            original(self, spec, teacher.train())

        return build

    return changed(Distillation, "__init__", make)


def teacher_learns_of_other_rows_on_one_rank() -> Bug:
    def make(original: Any) -> Any:
        def divergence(self: Any, logits: Any, wanted: torch.Tensor, counts: Any) -> torch.Tensor:
            return original(self, logits, wanted.roll(1, 0), counts)

        return divergence

    return changed(Distillation, "_divergence", make, rank=1)
