"""Delayed float8 scales of the reference: lists of numbers, one per layer and operand. Shares nothing with the engine.

Every operand of a step is rounded at the scale that the steps before gave; its largest magnitude is noted for the next.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DTYPES = {"input": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "gradient": torch.float8_e5m2}


class PlainDelayed:
    """`length`: steps that a scale looks back; `margin`: powers of two left above the largest magnitude."""

    def __init__(self, length: int, margin: int) -> None:
        self._length, self._margin, self._step = length, margin, 0
        self._past: dict[tuple[str, str], list[float]] = {}  # the newest last
        self._now: dict[tuple[str, str], float] = {}

    def begin(self, step: int) -> None:
        """Before a forward of step `step`, from 0 on."""
        if step != self._step:
            self.finish()
            self._step = step

    def finish(self) -> None:
        for key, largest in self._now.items():
            self._past[key] = [*self._past.get(key, []), largest][-self._length :]
        self._now.clear()

    def rounded(self, layer: str, operand: str, values: Tensor, *, is_noted: bool) -> Tensor:
        """The nearest numbers at the delayed scale, as float32; beyond the largest one, that one."""
        largest = float(values.abs().max())
        if is_noted:
            self._now[layer, operand] = max(self._now.get((layer, operand), 0.0), largest)
        past = self._past.get((layer, operand))
        limit = torch.finfo(DTYPES[operand]).max
        known = max(past) / 0.5**self._margin if past is not None else largest
        scale = limit / torch.tensor(known) if known else torch.tensor(1.0)
        return (values.float() * scale).clamp(-limit, limit).to(DTYPES[operand]).float() / scale


def delayed_of(model: nn.Module) -> PlainDelayed:
    found = getattr(model, "float8_delayed", None)
    return found if isinstance(found, PlainDelayed) else PlainDelayed(1, 0)
