"""Masks in pieces: together they are the mask, and attention by pieces is attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.masking_utils as masks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft.engine.cp.row_masks as row_masks
from weft.core.sequence_split import SequenceSplit
from weft.engine.cp.attention import _in_pieces
from weft.engine.cp.masks import WholeRows, mask_of
from weft.engine.cp.positions import Positions
from weft.engine.cp.row_masks import RowMask

LENGTH, ROWS = 48, 2
MaskFunction = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_masks, "PIECE", 5)
    monkeypatch.setattr(row_masks, "KEY_UNIT", 4)


def positions_of(rank: int, split: SequenceSplit = "zigzag") -> Positions:
    return Positions(length=LENGTH, degree=4, rank=rank, split=split)


def made(function: MaskFunction, positions: Positions, *, in_pieces: bool, documents: Tensor | None = None) -> Any:
    batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    if documents is not None:
        batch["position_ids"] = torch.arange(LENGTH).expand(ROWS, -1)
        function = masks.and_masks(function, masks.packed_sequence_mask_function(documents))
    rows = WholeRows.of(batch, positions, lambda _given: documents)
    ask = mask_of(masks.sdpa_mask, rows, queries=positions, is_fused=False, in_pieces=in_pieces)
    return ask(batch_size=ROWS, mask_function=function)


def attention(_module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2), None


@st.composite
def mask_functions(draw: st.DrawFn) -> MaskFunction:
    size = draw(st.integers(1, LENGTH + 4))
    kind = draw(st.sampled_from(["causal", "window", "chunked", "both ways"]))
    if kind == "window":
        return masks.sliding_window_causal_mask_function(size)
    if kind == "chunked":
        return masks.chunked_causal_mask_function(size, torch.zeros(ROWS, dtype=torch.int64))
    return masks.causal_mask_function if kind == "causal" else masks.bidirectional_mask_function


@given(
    mask_functions(),
    st.integers(0, 3),
    st.sampled_from(["zigzag", "contiguous"]),
    st.none() | st.lists(st.integers(1, LENGTH - 1), max_size=5),
)
def test_attention_by_pieces_is_attention(
    function: MaskFunction, rank: int, split: SequenceSplit, borders: list[int] | None
) -> None:
    documents = None
    if borders is not None:
        documents = torch.stack([sum((torch.arange(LENGTH) >= border).long() for border in set(borders[row:])) +
                                 torch.zeros(LENGTH, dtype=torch.int64) for row in range(ROWS)])  # fmt: skip
    positions = positions_of(rank, split)
    mask = made(function, positions, in_pieces=True, documents=documents)
    whole = made(function, positions, in_pieces=False, documents=documents)
    assert isinstance(mask, RowMask)
    assert mask.shape == whole.shape == (ROWS, 1, LENGTH // 4, LENGTH)
    generator = torch.Generator().manual_seed(rank)
    query, key, value = (
        torch.randn(ROWS, 2, length, 3, dtype=torch.float64, generator=generator)
        for length in (LENGTH // 4, LENGTH, LENGTH)
    )
    module = nn.Module()
    expected, _ = attention(module, query, key, value, whole)
    found, _ = _in_pieces(attention, module, query, (key, value), mask, {})
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_window_asks_for_the_keys_of_its_pieces_alone() -> None:
    """Rank 1 of 4, zig-zag: positions 6 to 11, and 36 to 41."""
    mask = made(masks.sliding_window_causal_mask_function(3), positions_of(1), in_pieces=True)
    assert [(each.queries, each.keys) for each in mask.pieces] == [
        (range(5), range(4, 12)),  # 6 to 10 see 4 to 10
        (range(5, 6), range(8, 12)),
        (range(6, 11), range(32, 44)),  # 36 to 40 see 34 to 40
        (range(11, 12), range(36, 44)),
    ]


FIXED = [
    masks.causal_mask_function,
    masks.sliding_window_causal_mask_function(7),
    masks.chunked_causal_mask_function(9, torch.zeros(ROWS, dtype=torch.int64)),
]


@pytest.mark.parametrize("function", FIXED)
def test_a_dry_run_foresees_the_pieces(function: MaskFunction) -> None:
    real = made(function, positions_of(2), in_pieces=True)
    with FakeTensorMode():
        foreseen = made(function, positions_of(2), in_pieces=True)
    assert foreseen.pieces == real.pieces


def test_a_query_without_keys_has_all_of_them() -> None:
    mask = made(lambda _b, _h, q, k: (q < 0) & (k < 0), positions_of(0), in_pieces=True)
    assert {each.keys for each in mask.pieces} == {range(LENGTH)}
