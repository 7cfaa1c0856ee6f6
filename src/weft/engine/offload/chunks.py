"""Divides the states of a rank's parameters into chunks of a bounded size, which stream through the device.

The states of one parameter group and dtype lie behind each other in one flat range, each parameter aligned. A chunk is
a range of it: small parameters whole, large ones in pieces. Pieces are cut at multiples of `unit`: a CPU kernel rounds
the elements after its last full vector in another way, so any other cut would change bits.
Parameters with 8-bit moments have banks of their own, by elements per scale: a code per element, a scale per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.engine.optim.adamw_8bit import SCALES
from weft.engine.ownership import local

UNIT = 1024  # elements: whole vectors of any CPU, whole pages of float32
ALIGNMENT = 64  # elements between the begins of parameters
FILE_ALIGNMENT = 2048  # the same in files, whose transfers are whole pages, also of two bytes per element
SCALES_ALIGNMENT = 4  # scales between the begins of parameters: 16 bytes, as compiled kernels read them
MASTER = "master"  # the key of masters among the states
WEIGHT = "weight"  # of weights: rounded ones that rest in host memory, or in files what a restart needs besides states


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
    block: int | None = None  # elements per scale of 8-bit moments
    has_weights: bool = False  # weights rest in host memory: rounded ones as a state, others are masters
    offsets: dict[nn.Parameter, int] = field(default_factory=dict)
    num_elements: int = 0
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def views_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The states of a parameter's local shard, in its shape."""
        own, begin = local(parameter), self.offsets[parameter]
        found = {key: self.part(key, flat, begin, begin + own.numel()) for key, flat in self.states.items()}
        return {key: part if self.is_scales(key) else part.view(own.shape) for key, part in found.items()}

    def states_of(self, piece: StatePiece, flats: Mapping[str, torch.Tensor], *, first: int) -> dict[str, torch.Tensor]:
        """The states of a piece in `flats`, which begin with element `first` of the bank."""
        begin, end = piece.offset - first, piece.offset - first + piece.end - piece.begin
        return {
            key: self.part(key, flat, begin, end) if self.is_scales(key) else piece.within(flat, first)
            for key, flat in flats.items()
        }

    def part(self, key: str, flat: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The entries of a state that belong to these elements."""
        return flat[self.num_entries(key, begin) : self.num_entries(key, end)]

    def num_entries(self, key: str, num_elements: int) -> int:
        return num_elements // (self.block or 1) if self.is_scales(key) else num_elements

    @staticmethod
    def is_scales(key: str) -> bool:
        return key.endswith(SCALES)


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
    alignment: int = ALIGNMENT,
    masters: torch.dtype | None = None,
    block_of: Callable[[nn.Parameter], int | None] = lambda _: None,
    has_weights: bool = False,
) -> tuple[list[StateBank], list[StateChunk]]:
    """Banks and chunks of an optimizer's groups. A parameter whose unit exceeds `chunk_elements` is cut at units.

    `alignment`: elements; parameters and pieces begin at its multiples, so chunks do too. `masters`: the dtype of
    masters that are states; None: parameters are their own masters.
    """
    banks: list[StateBank] = []
    chunks: list[StateChunk] = []
    for group in groups:
        kinds = {parameter: (parameter.dtype, block_of(parameter)) for parameter in group["params"]}
        for dtype, block in dict.fromkeys(kinds.values()):
            bank = StateBank(group=group, dtype=masters or dtype, block=block, has_weights=has_weights)
            own = [parameter for parameter, kind in kinds.items() if kind == (dtype, block)]
            chunks += _fill(bank, own, chunk_elements, unit_of, max(alignment, SCALES_ALIGNMENT * (block or 1)))
            banks.append(bank)
    return banks, chunks


def _fill(
    bank: StateBank,
    parameters: Sequence[nn.Parameter],
    chunk_elements: int,
    unit_of: Callable[[nn.Parameter], int],
    alignment: int,
) -> list[StateChunk]:
    chunks: list[StateChunk] = []
    for parameter in parameters:
        bank.offsets[parameter] = bank.num_elements
        for piece in _pieces(parameter, bank.num_elements, chunk_elements, math.lcm(unit_of(parameter), alignment)):
            end = piece.offset + piece.end - piece.begin
            if not chunks or end - chunks[-1].begin > chunk_elements:
                chunks.append(StateChunk(bank=bank, begin=piece.offset, end=end))
            chunks[-1].pieces.append(piece)
            chunks[-1].end = end
        bank.num_elements += -(-local(parameter).numel() // alignment) * alignment
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
