"""Divides the states of a rank's parameters into chunks of a bounded size, which stream through the device.

The states of one parameter group and dtype lie behind each other in one flat range, each parameter aligned. A chunk is
a range of it: small parameters whole, large ones in pieces. Pieces are cut at multiples of `unit`: a CPU kernel rounds
the elements after its last full vector in another way, so any other cut would change bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.engine.ownership import local

UNIT = 1024  # elements: whole vectors of any CPU, whole pages of float32
ALIGNMENT = 64  # elements between the begins of parameters
MASTER = "master"  # the key of masters among the states
WEIGHT = "weight"  # of weights that rest in host memory, rounded


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePiece:
    """Elements `begin` to `end` of a parameter's flattened local shard, at `offset` of its bank."""

    parameter: nn.Parameter
    begin: int
    end: int
    offset: int
    is_whole: bool
    is_last: bool  # of its parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor of the parameter's shape, sharing its memory; a whole one keeps the shape."""
        own = local(tensor)
        return own if self.is_whole else own.view(-1)[self.begin : self.end]

    def within(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        """The piece in `flat`, which holds the elements of the bank from `first` on."""
        found = flat[self.offset - first : self.offset - first + self.end - self.begin]
        return found.view(local(self.parameter).shape) if self.is_whole else found


@dataclass(kw_only=True, eq=False)
class StateBank:
    """The flat range of one parameter group and dtype; `states`: host memory by key."""

    group: dict[str, Any]
    dtype: torch.dtype  # of the values that updates change: masters, or parameters
    has_weights: bool = False  # weights rest in host memory: rounded ones as a state, others are masters
    offsets: dict[nn.Parameter, int] = field(default_factory=dict)
    num_elements: int = 0
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def views_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The states of a parameter's local shard, in its shape."""
        own, begin = local(parameter), self.offsets[parameter]
        return {key: flat[begin : begin + own.numel()].view(own.shape) for key, flat in self.states.items()}


@dataclass(kw_only=True, eq=False)
class StateChunk:
    """The elements `begin` to `end` of a bank."""

    bank: StateBank
    begin: int
    end: int
    pieces: list[StatePiece] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        return self.end - self.begin


def divide(
    groups: Sequence[dict[str, Any]],
    *,
    chunk_elements: int,
    unit_of: Callable[[nn.Parameter], int],
    masters: torch.dtype | None = None,
    has_weights: bool = False,
) -> tuple[list[StateBank], list[StateChunk]]:
    """Banks and chunks of an optimizer's groups. A parameter whose unit exceeds `chunk_elements` is cut at units.

    `masters`: the dtype of masters that are states; None: parameters are their own masters."""
    banks: list[StateBank] = []
    chunks: list[StateChunk] = []
    for group in groups:
        for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"]):
            bank = StateBank(group=group, dtype=masters or dtype, has_weights=has_weights)
            own = [parameter for parameter in group["params"] if parameter.dtype == dtype]
            chunks += _fill(bank, own, chunk_elements, unit_of)
            banks.append(bank)
    return banks, chunks


def _fill(
    bank: StateBank, parameters: Sequence[nn.Parameter], chunk_elements: int, unit_of: Callable[[nn.Parameter], int]
) -> list[StateChunk]:
    chunks: list[StateChunk] = []
    for parameter in parameters:
        bank.offsets[parameter] = bank.num_elements
        for piece in _pieces(parameter, bank.num_elements, chunk_elements, unit_of(parameter)):
            end = piece.offset + piece.end - piece.begin
            if not chunks or end - chunks[-1].begin > chunk_elements:
                chunks.append(StateChunk(bank=bank, begin=piece.offset, end=end))
            chunks[-1].pieces.append(piece)
            chunks[-1].end = end
        bank.num_elements += -(-local(parameter).numel() // ALIGNMENT) * ALIGNMENT
    return chunks


def _pieces(parameter: nn.Parameter, offset: int, chunk_elements: int, unit: int) -> list[StatePiece]:
    size = local(parameter).numel()
    length = max(unit, chunk_elements // unit * unit)
    return [
        StatePiece(
            parameter=parameter,
            begin=begin,
            end=min(begin + length, size),
            offset=offset + begin,
            is_whole=size <= length,
            is_last=begin + length >= size,
        )
        for begin in range(0, size, length)
    ]
