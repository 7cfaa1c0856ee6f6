"""Chunks of states: every element of every parameter in one piece, at places where no kernel rounds otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.core.shards import Chunk
from weft.engine.offload.chunks import ALIGNMENT, UNIT, divide
from weft.engine.optim.element_spans import spans_of

SHAPES = [(3, 5), (70, 100), (0, 8), (1,), (1024,), (33, 1024), (7,)]


@pytest.mark.parametrize("chunk_elements", [1, 1024, 5000, 2**24])
def test_every_element_is_in_one_piece(chunk_elements: int) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    groups = [{"params": parameters[:4]}, {"params": parameters[4:]}]
    banks, chunks = divide(groups, chunk_elements=chunk_elements, unit_of=lambda _: UNIT)
    assert [bank.group for bank in banks] == groups
    for bank in banks:
        bank.states = {"seen": torch.zeros(bank.num_elements)}
    for chunk in chunks:
        assert chunk.num_elements <= max(chunk_elements, UNIT)
        flat = chunk.bank.states["seen"]
        for piece in chunk.pieces:
            assert piece.begin % UNIT == 0
            piece.within(flat[chunk.begin : chunk.end], chunk.begin).add_(1)
            assert piece.of(piece.parameter.detach()).shape == piece.within(flat, 0).shape
    for bank in banks:
        assert all(begin % ALIGNMENT == 0 for begin in bank.offsets.values())
        for parameter in bank.offsets:
            assert torch.equal(bank.views_of(parameter)["seen"], torch.ones_like(parameter))
    for parameter in parameters:
        pieces = [piece for chunk in chunks for piece in chunk.pieces if piece.parameter is parameter]
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


def test_dtypes_do_not_share_a_bank() -> None:
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    banks, chunks = divide([{"params": parameters}], chunk_elements=100, unit_of=lambda _: UNIT)
    assert [(bank.dtype, len(bank.offsets)) for bank in banks] == [(torch.float32, 2), (torch.bfloat16, 1)]
    assert [len(chunk.pieces) for chunk in chunks] == [2, 1]


@pytest.mark.parametrize(
    ("chunk", "shape", "cut"),
    [
        (Chunk(offsets=(2, 0), sizes=(3, 6), local_offsets=(0, 0)), (8, 6), (4, 11)),  # rows: one row of elements
        (Chunk(offsets=(0, 2), sizes=(4, 3), local_offsets=(0, 0)), (4, 6), (3, 9)),  # columns: cut between rows
    ],
)
def test_a_cut_span_has_the_elements_of_its_piece(chunk: Chunk, shape: tuple[int, int], cut: tuple[int, int]) -> None:
    full = torch.arange(shape[0] * shape[1]).view(shape)
    own = full[chunk.global_index].contiguous()
    (span,) = spans_of([chunk], shape)
    part = span.cut(*cut)
    found = part.of(own.view(-1)[cut[0] : cut[1]])
    rows, columns = torch.arange(part.rows)[:, None], torch.arange(part.columns)
    assert torch.equal(found, part.first + rows * part.row_step + columns)
