"""Values planted into a run: losses of evaluations, training samples with a loss that is not finite, lost updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from weft.core.records import EvalRecord
from weft.data import Loader
from weft.engine.engine import Engine
from weft.engine.updates import Updates


@contextmanager
def scripted_losses(losses: Mapping[int, float], *, otherwise: float) -> Iterator[None]:
    """The loss of every evaluation, by the step before it."""

    def evaluate(engine: Engine, _batches: Any) -> EvalRecord:
        return EvalRecord(loss=losses.get(engine.steps_done, otherwise), tokens=8)

    with patch.object(Engine, "evaluate", evaluate):
        yield


MARK = 255  # a byte that no text of the tests has


@contextmanager
def bad_samples(samples: Collection[int], *, factor: float = math.nan) -> Iterator[None]:
    """The loss of a micro-batch with one of these training samples is multiplied by `factor`; the sample has MARK as
    its first token."""
    read, loss_sum = Loader.batch, Engine.loss_sum

    def batch(loader: Loader, position: int) -> Any:
        found = read(loader, position)
        share = loader.global_batch // loader.dp_degree
        first = position + loader.dp_rank * share
        for sample in samples if loader.shuffle else ():
            if first <= sample < first + share:
                found["input_ids"][sample - first, 0] = MARK
        return found

    def planted(engine: Engine, microbatch: Any, *, stage: int = 0) -> torch.Tensor:
        loss = loss_sum(engine, microbatch, stage=stage)
        return loss * factor if (microbatch["input_ids"] == MARK).any() else loss

    with patch.object(Loader, "batch", batch), patch.object(Engine, "loss_sum", planted):
        yield


@contextmanager
def without_update_of(step: int) -> Iterator[None]:
    """The update of one step is not made; everything else of it is."""
    update = Updates._update

    def dropped(updates: Updates) -> tuple[torch.Tensor, bool]:
        is_dropped = updates.engine.steps_done + 1 == step
        return (updates.engine.gradient_norm(), True) if is_dropped else update(updates)

    with patch.object(Updates, "_update", dropped):
        yield


@contextmanager
def samples_left_out(first: int, count: int) -> Iterator[None]:
    """Training goes on with sample `first + count` where `first` would come."""
    read = Loader.batch

    def batch(loader: Loader, position: int) -> Any:
        return read(loader, position + count if loader.shuffle and position >= first else position)

    with patch.object(Loader, "batch", batch):
        yield
