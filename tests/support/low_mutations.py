"""Bugs of states and weights at rest in bfloat16: wrong rounding, wrong bits, wrong AdamW. Each trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

import weft.engine.optim.adamw_low
import weft.engine.optim.adamw_low_update as update
import weft.engine.optim.clip
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.optim.adamw_low_update import Constants
from weft.engine.optim.element_spans import ElementSpan


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return patch.object(owner, name, make(getattr(owner, name)))


HALF = 0x8000  # added to what is cut off: rounding to nearest


def second_moment_rounded_to_nearest() -> Any:
    return replaced(update, "for_second_moment", lambda _: lambda bits: torch.full_like(bits, HALF, dtype=torch.int32))


def weight_rounded_to_nearest() -> Any:
    return replaced(update, "for_weight", lambda _: lambda bits: torch.full_like(bits, HALF, dtype=torch.int32))


def weight_cut_off() -> Any:
    return replaced(update, "for_weight", lambda _: lambda bits: torch.zeros_like(bits, dtype=torch.int32))


def bias_correction_forgotten() -> Any:
    return replaced(Constants, "step_size", lambda _: lambda self, step: self.learning_rate)


def root_not_corrected() -> Any:
    return replaced(Constants, "root_correction", lambda _: lambda self, step: 1.0)


def clipped_twice() -> Any:
    """In the kernel, and by a pass over the gradients before it."""

    def make(original: Any) -> Any:
        def step(self: AdamWLow) -> None:
            if self.gradient_factor is not None:
                parameters = [parameter for group in self.param_groups for parameter in group["params"]]
                weft.engine.optim.clip.scale_gradients(parameters, self.gradient_factor)
            original(self)

        return step

    return replaced(AdamWLow, "step", make)


def factor_kept_for_the_next_step() -> Any:
    """The first factor clips every step."""

    def make(original: Any) -> Any:
        def step(self: AdamWLow) -> None:
            first = self.__dict__.setdefault("first_factor", self.gradient_factor)
            self.gradient_factor = first
            original(self)

        return step

    return replaced(AdamWLow, "step", make)


def bits_by_local_element() -> Any:
    """Every rank counts its own rows from zero."""

    def make(original: Any) -> Any:
        def spans_of(chunks: Any, shape: Any) -> list[ElementSpan]:
            spans = original(chunks, shape)
            return [
                ElementSpan(local_index=s.local_index, rows=s.rows, columns=s.columns, first=0, row_step=s.row_step)
                for s in spans
            ]

        return spans_of

    return replaced(weft.engine.optim.adamw_low, "spans_of", make)


def the_same_bits_every_step() -> Any:
    return replaced(update, "words_of", lambda original: lambda key, step: original(key, 1))


def one_key_for_all_parameters() -> Any:
    return patch.object(weft.engine.optim.adamw_low, "key_of", lambda seed, name: 1)


def moments_read_after_rounding() -> Any:
    """The weight moves by what is stored, not by what was computed."""

    def make(original: Any) -> Any:
        def piece(weight: Any, gradient: Any, mean: Any, square: Any, *rest: Any) -> None:
            before, (_factor, _bits, step, constants) = weight.clone(), rest
            original(weight, gradient, mean, square, *rest)
            root = square.float().sqrt() / constants.root_correction(step) + constants.epsilon
            kept = before * (1.0 - constants.learning_rate * constants.decay)
            weight.copy_(kept - constants.step_size(step) * mean.float() / root)

        return piece

    return replaced(update, "_piece", make)
