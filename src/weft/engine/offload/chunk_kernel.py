"""The optimizer's own update, applied to some pieces at a time: the same kernel as without offload, so the same bits.

A second optimizer object of the same class takes views of weights, gradients and states instead of parameters.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from weft.core.errors import BadValueError, NotBuiltError
from weft.engine.offload.chunks import UNIT, StateBank, StatePiece
from weft.engine.optim.adamw_8bit import PARTS, RowwiseAdamW8bit, joined
from weft.engine.optim.adamw_low import AdamWLow, Place
from weft.engine.optim.adamw_low_update import PIECE_ELEMENTS
from weft.engine.ownership import local

State = dict[str, torch.Tensor]


class ChunkKernel:
    """See the module. `optimizer` is not changed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._places = dict(optimizer.states.places) if isinstance(optimizer, AdamWLow) else {}
        self._own: Any = object.__new__(type(optimizer))
        self._own.__dict__.update(optimizer.__dict__)
        # hooks of the optimizer are called once per step, not once per chunk
        self._own._optimizer_step_pre_hooks, self._own._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def unit_of(self, parameter: nn.Parameter) -> int:
        """Elements between which a parameter may be cut without a change of bits."""
        if isinstance(self._own, RowwiseAdamW8bit):
            return max(1, local(parameter).numel())  # its kernel is compiled by shape: the same shapes, the same bits
        if parameter not in self._places:
            return UNIT
        spans = self._places[parameter].spans
        if len(spans) != 1:
            return max(1, local(parameter).numel())
        if spans[0].rows == 1:
            return PIECE_ELEMENTS
        return max(1, PIECE_ELEMENTS // spans[0].columns) * spans[0].columns

    @torch.no_grad()
    def update(
        self,
        group: dict[str, Any],
        pieces: Sequence[StatePiece],
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[State],
        factor: torch.Tensor | None,
    ) -> None:
        """One update of `pieces`, all tensors on one device; the constants are those of `group` now."""
        if not pieces:
            return
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        self._own.param_groups = [{**group, "params": list(weights)}]
        self._own.state = defaultdict(dict, zip(weights, map(joined, states), strict=True))
        if self._places:
            places = {weight: self._place(piece) for weight, piece in zip(weights, pieces, strict=True)}
            self._own.states = replace(self._own.states, places=places)
            self._own.gradient_factor = factor
        self._own.step()
        # else the last chunk's gradients and memory would live until the next step
        self._own.param_groups, self._own.state = [], defaultdict(dict)
        if self._places:
            self._own.states = replace(self._own.states, places={})

    def _place(self, piece: StatePiece) -> Place:
        place = self._places[piece.parameter]
        if piece.is_whole:
            return place
        return replace(place, spans=(place.spans[0].cut(piece.begin, piece.end),))


def require_known(optimizer: Optimizer) -> None:
    """Refuse optimizers whose states this room cannot lay out, and parameters that it cannot cut."""
    if type(optimizer) not in (Adam, AdamW, SGD, AdamWLow, RowwiseAdamW8bit):
        raise NotBuiltError(
            f"optimizer offload does not execute {type(optimizer).__name__}",
            hint="use train.optimizer = 'adamw', 'adam', 'sgd' or 'adamw8bit', or set offload.optimizer = 'none'",
        )
    for group in optimizer.param_groups:
        for key in ("amsgrad", "dampening", "differentiable"):
            if group.get(key):
                raise NotBuiltError(
                    f"optimizer offload does not execute {type(optimizer).__name__} with {key} = {group[key]}",
                    hint=f"leave {key} at its default, or set offload.optimizer = 'none'",
                )
        for parameter in group["params"]:
            if not local(parameter.detach()).is_contiguous():
                raise BadValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not contiguous, as optimizer offload requires",
                    hint="call .contiguous() on it, or set offload.optimizer = 'none'",
                )


def state_dtypes(optimizer: Optimizer, bank: StateBank) -> dict[str, torch.dtype]:
    """The states of a bank's parameters by name, besides step counters."""
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": bank.dtype} if bank.group["momentum"] else {}
    moments = ("exp_avg", "exp_avg_sq")
    if bank.block is not None:
        return {f"{key}{part}": dtype for key in moments for part, dtype in PARTS.items()}
    if isinstance(optimizer, AdamWLow):
        return dict(zip(moments, (optimizer.states.first, optimizer.states.second), strict=True))
    return dict.fromkeys(moments, bank.dtype)


def block_of(optimizer: Optimizer, parameter: nn.Parameter) -> int | None:
    """Elements per scale of a parameter with 8-bit moments; None: they are not quantised."""
    return optimizer.block_of(parameter) if isinstance(optimizer, RowwiseAdamW8bit) else None


def new_counter(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> State:
    """The step counter where the optimizer itself would put it: a fused kernel reads it on the device of the update."""
    if isinstance(optimizer, SGD):
        return {}
    is_on_device = bool(group.get("fused") or group.get("capturable"))
    return {"step": torch.zeros((), device=device if is_on_device else "cpu")}
