"""Adafactor: a second moment of a matrix as the means of its rows and columns, over the full matrix in every layout.

    r, c   running means of g^2 over a row, over a column;  v = r c / mean(r)     (a vector has v itself)
    u      g / sqrt(v), divided by max(1, rms(u));   w' = w (1 - lr wd) - max(1e-3, rms(w)) min(lr, 1/sqrt(t)) u

Two all-reduces per step over the ranks that share parameters: sums of squares by row and column with those of weights,
then those of updates. Rows and columns are full on every rank (4 bytes per row and per column of a matrix), so a
checkpoint of any layout loads on any other. The numbers are those of `torch.optim.Adafactor`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from weft.comm.groups import sum_over
from weft.core.shards import Chunk
from weft.engine.ownership import LocalShards, chunks_of, local

FACTORS = ("row_var", "col_var")  # full on every rank, whatever the parameter's shards
BETA2_DECAY, LEAST_RMS, LEAST_MEAN = -0.8, 1e-3, torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True)
class HeldChunk:
    """A chunk of a parameter on this rank; `share`: 1 over the ranks of the group that hold it."""

    chunk: Chunk
    share: float


@dataclass(frozen=True, kw_only=True)
class HeldParameter:
    """A parameter with its full shape and this rank's chunks."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[HeldChunk, ...]

    @property
    def is_factored(self) -> bool:
        return len(self.shape) > 1


def held_parameters(
    named: Mapping[str, nn.Parameter], shards: LocalShards, group: dist.ProcessGroup | None
) -> dict[nn.Parameter, HeldParameter]:
    """This rank's chunks of every parameter. Collective over the group; None: no other rank shares them."""
    own = {name: chunks_of(parameter, shards.get(name)) for name, parameter in named.items()}
    places = {name: [(chunk.offsets, chunk.sizes) for chunk in chunks] for name, chunks in own.items()}
    tables: list[Any] = [places]
    if group is not None and active_fake_mode() is None:
        tables = [None] * dist.get_world_size(group)
        dist.all_gather_object(tables, places, group=group)
    held = {name: Counter(place for table in tables for place in table[name]) for name in own}
    found = {}
    for name, parameter in named.items():
        shard = shards.get(name)
        chunks = tuple(
            HeldChunk(chunk=chunk, share=1 / held[name][chunk.offsets, chunk.sizes])
            for chunk in own[name]
            if chunk.num_elements
        )
        shape = tuple(parameter.shape) if shard is None else shard.shape
        found[parameter] = HeldParameter(name=name, shape=shape, chunks=chunks)
    return found


class Adafactor(Optimizer):
    """See the module. `held`: of every parameter; `group`: the ranks that share them."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        held: Mapping[nn.Parameter, HeldParameter],
        group: dist.ProcessGroup | None,
        lr: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._held, self._group = held, group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("Adafactor takes no closure")
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.grad is not None:
                self._begin(parameter)
        if not any(float(group["lr"]) for group in self.param_groups):
            return  # states alone: no rank waits for another
        weights = self._moments(parameters)
        updates = self._update_squares(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._apply(parameter, group, weights[parameter], updates[parameter])

    def _begin(self, parameter: nn.Parameter) -> None:
        state, held = self.state[parameter], self._held[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if held.is_factored:
                state["row_var"] = self._zeros(parameter, (*held.shape[:-1], 1))
                state["col_var"] = self._zeros(parameter, (*held.shape[:-2], 1, held.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(parameter)
        state["step"] += 1

    def _moments(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Update all second moments; return the sum of squares of every full parameter."""
        parts = [part for parameter in parameters for part in self._squares(parameter)]
        summed = iter(self._summed(parts))
        weights = {}
        for parameter in parameters:
            held, state = self._held[parameter], self.state[parameter]
            weights[parameter] = next(summed)
            sums = [next(summed) for _ in FACTORS] if held.is_factored else []
            if parameter.grad is None:
                continue
            fresh = float(state["step"]) ** BETA2_DECAY
            for key, value, size in zip(FACTORS, sums, (held.shape[-1], held.shape[-2] if sums else 0), strict=False):
                state[key].lerp_((value / size).view_as(state[key]), fresh)
            if not sums:
                local(state["variance"]).lerp_(local(parameter.grad).square(), fresh)
        return weights

    def _squares(self, parameter: nn.Parameter) -> list[Tensor]:
        """This rank's part of the sums of squares: of the weight, of the gradient by row and by column."""
        held, weight = self._held[parameter], local(parameter.detach())
        total = self._zeros(parameter, ())
        for part in held.chunks:
            total += part.share * weight[part.chunk.local_index].float().square().sum()
        if not held.is_factored:
            return [total]
        rows, columns = (self._zeros(parameter, shape) for shape in (held.shape[:-1], _columns(held.shape)))
        for part in held.chunks if parameter.grad is not None else ():
            square = local(parameter.grad)[part.chunk.local_index].float().square() * part.share  # type: ignore[arg-type]
            at = part.chunk.global_index
            rows[at[:-1]] += square.sum(-1)
            columns[(*at[:-2], at[-1])] += square.sum(-2)
        return [total, rows, columns]

    def _update_squares(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The sum of squares of the full update of every parameter."""
        totals = []
        for parameter in parameters:
            total = self._zeros(parameter, ())
            for part in self._held[parameter].chunks if parameter.grad is not None else ():
                total += part.share * self._update(parameter, part.chunk).square().sum()
            totals.append(total)
        return dict(zip(parameters, self._summed(totals), strict=True))

    def _update(self, parameter: nn.Parameter, chunk: Chunk) -> Tensor:
        """The gradient over the root of its second moment. Computed twice: it would need the memory of a state."""
        state, at = self.state[parameter], chunk.global_index
        gradient = local(parameter.grad)[chunk.local_index].float()  # type: ignore[arg-type]
        if self._held[parameter].is_factored:
            rows, columns = state["row_var"], state["col_var"]
            mean = rows.mean(dim=-2, keepdim=True).clamp(min=LEAST_MEAN)
            leading = at[:-2]
            square = rows[(*leading, at[-2])] * columns[(*leading, slice(None), at[-1])] / mean[leading]
        else:
            square = local(state["variance"])[chunk.local_index]
        update: Tensor = square.clamp(min=LEAST_MEAN**2).rsqrt() * gradient
        return update

    def _apply(self, parameter: nn.Parameter, group: dict[str, Any], weights: Tensor, updates: Tensor) -> None:
        held, rate, step = self._held[parameter], float(group["lr"]), float(self.state[parameter]["step"])
        size = max(1, torch.Size(held.shape).numel())
        scale = (weights / size).sqrt().clamp(min=LEAST_RMS) * min(rate, step**-0.5)
        scale = scale / (updates / size).sqrt().clamp(min=1.0)
        weight = local(parameter.detach())
        changes = [(part.chunk.local_index, self._update(parameter, part.chunk) * scale) for part in held.chunks]
        weight.mul_(1 - rate * group["weight_decay"])
        for index, change in changes:
            weight[index] -= change

    def _summed(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parts, each summed over the ranks that share parameters: one all-reduce."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        if self._group is not None:
            sum_over(flat, self._group)
        pieces = torch.split(flat, [part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def _zeros(self, parameter: nn.Parameter, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.float32, device=local(parameter).device)


def _columns(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1])
