"""Whole matrices out of shards: each one is assembled at one rank, changed there, and its blocks go back.

A parameter [experts, rows, columns] is one matrix per expert. A matrix that some rank holds in full is changed by every
rank that holds it, without a message. The others are taken in rounds (`core/muon.py`), one matrix per rank and round:

    all-to-all: blocks to the owners -> the owner's function of the whole matrix -> all-to-all: blocks to their holders

So a round needs the memory of a few matrices, whatever the model's size. Ranks tell each other once what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode

from weft.core.muon import order_key
from weft.core.shards import Chunk

Key = tuple[str, int]  # a parameter's name, and the place of the matrix in it


@dataclass(frozen=True, kw_only=True)
class MatrixPiece:
    """A block of a matrix that a rank holds."""

    begin: tuple[int, int]
    size: tuple[int, int]
    local_begin: tuple[int, ...]  # in the rank's local tensor
    copy_of: int = 0  # in a dry run, which does not know the blocks of other ranks

    @property
    def num_elements(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.begin, self.size, self.copy_of

    def of_matrix(self, matrix: Tensor) -> Tensor:
        (row, column), (rows, columns) = self.begin, self.size
        return matrix[row : row + rows, column : column + columns]

    def of_local(self, tensor: Tensor) -> Tensor:
        *places, row, column = self.local_begin
        for place in places:
            tensor = tensor[place]
        return tensor[row : row + self.size[0], column : column + self.size[1]]


Table = Mapping[Key, tuple[MatrixPiece, ...]]  # of one rank


@dataclass(frozen=True, kw_only=True)
class MatrixRoute:
    """A round's matrix for one owner: which rank sends which blocks, and all blocks of every rank."""

    key: Key
    shape: tuple[int, int]
    sources: tuple[tuple[MatrixPiece, ...], ...]
    holders: tuple[tuple[MatrixPiece, ...], ...]


def pieces_of(name: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Key, MatrixPiece]]:
    """The blocks of matrices that a rank holds of one parameter."""
    for chunk in (chunk for chunk in chunks if chunk.num_elements):
        (row, column), (rows, columns) = chunk.offsets[-2:], chunk.sizes[-2:]
        leading = chunk.sizes[0] if len(chunk.sizes) > 2 else 1
        for index in range(leading):
            stacked = (chunk.local_offsets[0] + index,) if len(chunk.sizes) > 2 else ()
            place = chunk.offsets[0] + index if stacked else 0
            yield (
                (name, place),
                MatrixPiece(
                    begin=(row, column), size=(rows, columns), local_begin=(*stacked, *chunk.local_offsets[-2:])
                ),
            )


class MatrixOwners:
    """See the module. `shapes`: (rows, columns) by parameter name; `own`: this rank's blocks."""

    def __init__(
        self, own: Table, shapes: Mapping[str, tuple[int, int]], *, group: dist.ProcessGroup | None = None
    ) -> None:
        self._group, self.shapes = group, shapes
        self._rank = dist.get_rank(group) if group is not None else 0
        self._num_ranks = dist.get_world_size(group) if group is not None else 1
        tables = _tables(own, shapes, group=group)
        keys = sorted({key for table in tables for key in table}, key=lambda key: (order_key(*shapes[key[0]]), key))
        shared = [key for key in keys if not _is_held(key, shapes[key[0]], tables)]
        self.own = {key: own[key] for key in keys if key in own and key not in set(shared)}
        routes = [_route(key, shapes[key[0]], tables) for key in shared]
        self.rounds = [routes[at : at + self._num_ranks] for at in range(0, len(routes), self._num_ranks)]

    def exchange(
        self,
        read: Callable[[Key, MatrixPiece], Tensor],
        change: Callable[[Key, Tensor], Tensor],
        write: Callable[[Key, MatrixPiece, Tensor], None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Change the matrices that ranks share. Collective. `read` and `write` are given this rank's blocks."""
        for routes in self.rounds:
            mine = routes[self._rank] if self._rank < len(routes) else None
            sent = [[read(one.key, piece) for piece in one.sources[self._rank]] for one in routes]
            sizes = [_sizes(pieces) for pieces in mine.sources] if mine is not None else []
            received = self._send(sent, sizes, dtype=dtype, device=device)
            back: list[list[Tensor]] = []
            if mine is not None:
                changed = change(mine.key, _assembled(mine, received, dtype=dtype, device=device))
                back = [[piece.of_matrix(changed) for piece in pieces] for pieces in mine.holders]
            sizes = [_sizes(one.holders[self._rank]) for one in routes]
            returned = self._send(back, sizes, dtype=dtype, device=device)
            for one, values in zip(routes, returned, strict=False):
                for piece, value in zip(one.holders[self._rank], values, strict=True):
                    write(one.key, piece, value.view(piece.size))

    def _send(
        self, sent: list[list[Tensor]], sizes: list[list[int]], *, dtype: torch.dtype, device: torch.device
    ) -> list[list[Tensor]]:
        """All-to-all of blocks; `sizes`: of those that come from each rank. Ranks beyond the lists have none."""
        empty: list[Any] = [[]] * self._num_ranks
        sent, sizes = [*sent, *empty][: self._num_ranks], [*sizes, *empty][: self._num_ranks]
        given = [sum(block.numel() for block in blocks) for blocks in sent]
        flat = [block.to(dtype).reshape(-1) for blocks in sent for block in blocks]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        taken = [sum(of_rank) for of_rank in sizes]
        incoming = torch.empty(sum(taken), dtype=dtype, device=device)
        dist.all_to_all_single(incoming, outgoing, taken, given, group=self._group)
        values = iter(torch.split(incoming, [size for of_rank in sizes for size in of_rank]))
        return [[next(values) for _ in of_rank] for of_rank in sizes]


def _sizes(pieces: Sequence[MatrixPiece]) -> list[int]:
    return [piece.num_elements for piece in pieces]


def _assembled(route: MatrixRoute, received: list[list[Tensor]], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.empty(route.shape, dtype=dtype, device=device)
    for pieces, values in zip(route.sources, received, strict=True):
        for piece, value in zip(pieces, values, strict=True):
            piece.of_matrix(matrix).copy_(value.view(piece.size))
    return matrix


def _is_held(key: Key, shape: tuple[int, int], tables: Sequence[Table]) -> bool:
    """Whether every rank that holds some of the matrix holds all of it."""
    held = [{piece.identity: piece.num_elements for piece in table[key]} for table in tables if key in table]
    return all(sum(pieces.values()) == shape[0] * shape[1] for pieces in held)


def _route(key: Key, shape: tuple[int, int], tables: Sequence[Table]) -> MatrixRoute:
    """A block that several ranks hold comes from the first of them, and goes back to all."""
    known: set[Any] = set()
    sources = []
    for table in tables:
        fresh = tuple(piece for piece in table.get(key, ()) if piece.identity not in known)
        known.update(piece.identity for piece in fresh)
        sources.append(fresh)
    return MatrixRoute(
        key=key, shape=shape, sources=tuple(sources), holders=tuple(table.get(key, ()) for table in tables)
    )


def _tables(own: Table, shapes: Mapping[str, tuple[int, int]], *, group: dist.ProcessGroup | None) -> list[Table]:
    """The blocks of every rank of the group. Collective; a dry run takes those of others as large as its own."""
    if group is None:
        return [own]
    num_ranks = dist.get_world_size(group)
    if active_fake_mode() is not None:
        return [_imagined(own, shapes, rank) for rank in range(num_ranks)]
    tables: list[Any] = [None] * num_ranks
    dist.all_gather_object(tables, dict(own), group=group)
    return tables


def _imagined(own: Table, shapes: Mapping[str, tuple[int, int]], rank: int) -> Table:
    def place(key: Key, pieces: tuple[MatrixPiece, ...]) -> int:
        rows, columns = shapes[key[0]]
        return rank % max(1, round(rows * columns / sum(_sizes(pieces))))

    return {key: tuple(replace(piece, copy_of=place(key, pieces)) for piece in pieces) for key, pieces in own.items()}
