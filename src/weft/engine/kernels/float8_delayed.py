"""Delayed scaling: the scale of an operand follows from its largest magnitudes in the steps before.

    amax[t]    the largest magnitude in step t, over all micro-batches, ranks and parts of the operand
    factor[t]  largest code / max(amax[t-1], ..., amax[t-N]) / 2^margin; larger values saturate

An operand is read once, and no product waits for other ranks: the amax of all layers are reduced together, in one
all-reduce at the end of a step. They are those of the global batch, so scales are the same in every layout, and every
micro-batch of a step has the same ones. The first step has no history and scales by its own operands, as the recipe
`tensorwise`. A skipped step leaves no amax, nor does one that is not finite.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode

from weft.comm.observer import buffer_collectives
from weft.engine.kernels.float8_operands import E4M3, E5M2, Role, Sharing, codes_of, scale_of

ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")


@dataclass
class _Phase:
    """Shared by all layers: whether a step is under way, and whether some step has left its amax."""

    is_recording: bool = False
    has_history: bool = False


@dataclass(frozen=True)
class DelayedScale:
    """The scales of one layer: views of this rank's tensors [roles]."""

    amax: Tensor  # of this step so far
    factors: Tensor
    phase: _Phase = field(repr=False)

    @torch.no_grad()
    def quantise(self, values: Tensor, role: Role, sharing: Sharing) -> tuple[Tensor, Tensor]:
        """Codes, and the factor that restores them."""
        at, dtype = ROLES.index(role), E5M2 if role == "gradient" else E4M3
        phase, factor = self.phase, self.factors[at]
        if phase.is_recording or not phase.has_history:
            largest = values.abs().amax().float()
            if phase.is_recording:
                self.amax[at] = torch.maximum(self.amax[at], largest)
            if not phase.has_history:
                factor = scale_of(sharing.largest(largest, is_of_row=False), dtype)
        return codes_of(values, factor, dtype), factor.reciprocal()


class DelayedScales:
    """The history of all layers, equal on all ranks. `names`: layers of all ranks in one order."""

    def __init__(self, names: Sequence[str], *, length: int, margin: int, device: torch.device) -> None:
        self._names, self._margin = tuple(names), margin
        self._history = torch.zeros(len(names), len(ROLES), length, device=device)  # the newest first
        self._amax = torch.zeros(len(names), len(ROLES), device=device)
        self._factors = torch.ones_like(self._amax)
        self._phase = _Phase()

    def of(self, name: str) -> DelayedScale:
        at = self._names.index(name)
        return DelayedScale(self._amax[at], self._factors[at], self._phase)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forwards and backwards of a step; evaluations leave no amax."""
        self._phase.is_recording = True
        try:
            yield
        finally:
            self._phase.is_recording = False

    @torch.no_grad()
    def finish_step(self, *, is_skipped: bool) -> None:
        """Add the amax of this step to the history. Collective; dry runs have none."""
        if is_skipped or active_fake_mode() is not None:
            self._amax.zero_()
            return
        with buffer_collectives():
            dist.all_reduce(self._amax, op=dist.ReduceOp.MAX)
        self._history = self._history.roll(1, dims=2)
        self._history[:, :, 0] = torch.where(self._amax.isfinite(), self._amax, 0.0)
        self._amax.zero_()
        self._set_factors()

    def _set_factors(self) -> None:
        """A layer without a history, one that no step has used yet, keeps the factor 1."""
        largest = self._history.amax(2)
        most = torch.tensor([torch.finfo(E5M2 if role == "gradient" else E4M3).max for role in ROLES])
        made = most.to(largest.device) / largest / 2.0**self._margin
        self._factors.copy_(torch.where(largest > 0, made, 1.0))
        self._phase.has_history = True

    # --- state --------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, str]:
        """The history of each layer: float32 numbers, the newest step first, in base64."""
        if not self._phase.has_history:
            return {}
        rows = self._history.cpu().numpy().astype("<f4")
        return {name: base64.b64encode(row.tobytes()).decode() for name, row in zip(self._names, rows, strict=True)}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """A history of another length: its newest steps. None, of a run with another recipe: it begins now."""
        self._history.zero_()
        self._amax.zero_()
        self._phase.has_history = False
        for at, name in enumerate(self._names):
            if name in scalars:
                data = bytearray(base64.b64decode(scalars[name]))
                held = torch.frombuffer(data, dtype=torch.float32).view(len(ROLES), -1)[:, : self._history.shape[2]]
                self._history[at, :, : held.shape[1]] = held
        if scalars:
            self._set_factors()
