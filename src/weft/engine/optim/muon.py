"""Muon for the matrices of blocks, AdamW for all other parameters, as one optimizer.

    m' = mu m + (1 - mu) g,   o = orthogonal((1 - mu) g + mu m'),   w' = w (1 - lr wd) - lr scale(rows, columns) o

The momentum lies where the parameter's shards lie; only `o` needs the whole matrix (`matrix_owners.py`). The numbers
are those of `torch.optim.Muon`; a fused projection of queries, keys and values is one matrix, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.core.muon import Scale, rate_scale
from weft.engine.optim.matrix_owners import Key, MatrixOwners, MatrixPiece
from weft.engine.optim.newton_schulz import orthogonalised
from weft.engine.ownership import local

Group = dict[str, Any]


class Muon(Optimizer):
    """See the module. `rest` updates the groups that are not matrices, and shares this optimizer's state."""

    def __init__(
        self,
        groups: list[Group],
        rest: Optimizer | None,
        *,
        names: Mapping[nn.Parameter, str],
        owners: MatrixOwners,
        lr: float,
        momentum: float,
        scale: Scale,
        dtype: torch.dtype,
    ) -> None:
        self._rest, self._owners, self._scale, self._dtype = rest, owners, scale, dtype
        self._matrices, self._device = list(groups), next(iter(names)).device
        others = rest.param_groups if rest is not None else []
        super().__init__([*groups, *others], {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self._parameters = {names[parameter]: parameter for group in groups for parameter in group["params"]}
        if rest is not None:
            rest.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("Muon takes no closure")
        if self._rest is not None:
            self._rest.step()
        group_of = {parameter: group for group in self._matrices for parameter in group["params"]}
        for parameter, group in group_of.items():
            if parameter.grad is not None:
                self._add_gradient(parameter, group)
        if any(float(group["lr"]) for group in self._matrices):
            self._update(group_of)

    def _add_gradient(self, parameter: nn.Parameter, group: Group) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        local(state["momentum_buffer"]).lerp_(local(_gradient(parameter)), 1 - group["momentum"])

    def _update(self, group_of: Mapping[nn.Parameter, Group]) -> None:
        """Every rank joins every round, whichever of its parameters have gradients."""

        def read(key: Key, piece: MatrixPiece) -> Tensor:
            parameter = self._parameters[key[0]]
            return self._direction(parameter, group_of[parameter]["momentum"], piece)

        def write(key: Key, piece: MatrixPiece, update: Tensor) -> None:
            parameter = self._parameters[key[0]]
            if parameter.grad is not None:
                self._apply(parameter, piece, update, group_of[parameter], self._owners.shapes[key[0]])

        for key, pieces in self._owners.own.items():
            whole = torch.empty(self._owners.shapes[key[0]], dtype=self._dtype, device=self._device)
            for piece in pieces:
                piece.of_matrix(whole).copy_(read(key, piece))
            changed = orthogonalised(whole, self._dtype)
            for piece in pieces:
                write(key, piece, piece.of_matrix(changed))
        self._owners.exchange(
            read,
            lambda _, matrix: orthogonalised(matrix, self._dtype),
            write,
            dtype=self._dtype,
            device=self._device,
        )

    def _direction(self, parameter: nn.Parameter, momentum: float, piece: MatrixPiece) -> Tensor:
        """The block of what is made orthogonal; zeros without a gradient, which other ranks may have."""
        if parameter.grad is None:
            return torch.zeros(piece.size, dtype=self._dtype, device=parameter.device)
        buffer = piece.of_local(local(self.state[parameter]["momentum_buffer"]))
        return piece.of_local(local(parameter.grad)).lerp(buffer, momentum)

    def _apply(
        self, parameter: nn.Parameter, piece: MatrixPiece, update: Tensor, group: Group, shape: tuple[int, int]
    ) -> None:
        rate = float(group["lr"])
        weight = piece.of_local(local(parameter.detach()))
        weight.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate * rate_scale(self._scale, *shape))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("the parameter has no gradient")
    return parameter.grad
