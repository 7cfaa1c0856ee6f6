"""Dropout of a context-parallel rank is its slice of that of whole rows, also of rows that do not divide."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from context_ranks import ROWS, Attention, EagerAttention, Rank, of_one_process
from tolerances import SAME_ROW_ABS
from torch import Tensor, nn

from weft.core.errors import NotBuiltError
from weft.core.plan import ContextParallel
from weft.engine.cp.attention import ContextAttention
from weft.engine.cp.slices import Attending
from weft.engine.mesh import ContextGroups
from weft.engine.tp.activation_layout import ActivationLayout

WIDTH, LENGTHS = 6, (16, 13)
NOISES = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "jitter": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
}


def ranks(**given: Any) -> list[Rank]:
    splits: Any = ("zigzag", "contiguous")
    places = itertools.product(splits, (2, 4), LENGTHS)
    return [
        Rank(length=length, cp=cp, cp_rank=rank, split=split, **given)
        for split, cp, length in places
        for rank in range(cp)
    ]


def rows(length: int, *, is_flat: bool = False) -> Tensor:
    x = torch.arange(1.0, 1 + ROWS * length * WIDTH).view(ROWS, length, WIDTH)
    return x.flatten(0, 1) if is_flat else x


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("noise", NOISES)
def test_hidden_states_drop_by_global_position(noise: str, is_flat: bool) -> None:
    for rank in ranks():
        expected = rank.own(of_one_process(NOISES[noise], rows(rank.length)), 1)
        own = rank.own(rows(rank.length), 1)
        with rank.drawing():
            found = NOISES[noise](own.flatten(0, 1) if is_flat else own).view_as(own)
        assert torch.equal(rank.real(found, 1), rank.real(expected, 1))


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_sequence_parallel_divides_a_ranks_positions_again(tp_rank: int, is_flat: bool) -> None:
    for rank in ranks(tp=2, tp_rank=tp_rank, layout="stream"):
        expected = rank.own(of_one_process(NOISES["dropout"], rows(rank.length)), 1)
        own = rank.own_of_tp(rank.own(rows(rank.length), 1), 1)
        with rank.drawing():
            found = NOISES["dropout"](own.flatten(0, 1) if is_flat else own).view_as(own)
        is_real = rank.own_of_tp(rank.positions.index(own.device), 0) < rank.length
        assert torch.equal(found[:, is_real], rank.own_of_tp(expected, 1)[:, is_real])


def test_positions_and_a_width_are_sliced_together() -> None:
    for rank in ranks(tp=2, tp_rank=1, layout="inside"):
        expected = rank.own_of_tp(rank.own(of_one_process(NOISES["dropout"], rows(rank.length)), 1), 2)
        own = rank.own_of_tp(rank.own(rows(rank.length), 1), 2)
        with rank.drawing():
            assert torch.equal(rank.real(NOISES["dropout"](own), 1), rank.real(expected, 1))


@pytest.mark.parametrize("tp", [{}, {"tp": 2, "tp_rank": 1, "layout": "inside"}])
@pytest.mark.parametrize(("kind", "is_masked"), [(Attention, False), (Attention, True), (EagerAttention, True)])
def test_attention_weights_drop_by_global_head_query_and_key(
    kind: type[Attention], is_masked: bool, tp: dict[str, Any]
) -> None:
    for rank in ranks(**tp):
        generator = torch.Generator().manual_seed(0)
        shape = (ROWS, 8, rank.length, WIDTH)
        three = {name: torch.randn(shape, generator=generator) for name in ("query", "key", "value")}
        allowed = torch.ones(rank.length, rank.length, dtype=torch.bool).tril().triu(-5)
        attention = kind(**three, mask=allowed.expand(ROWS, 1, -1, -1) if is_masked else None)
        for found, expected in (attention.gathered(rank), attention.over_heads(rank)):
            torch.testing.assert_close(found, expected, rtol=0.0, atol=SAME_ROW_ABS)


def test_recompute_that_stops_in_an_attention_leaves_it() -> None:
    attending = Attending()
    with pytest.raises(RuntimeError, match="stopped"), attending.by("gather"):
        raise RuntimeError("stopped")
    assert attending.now == ""


@pytest.mark.parametrize("shape", [(ROWS, 5, WIDTH), (ROWS, 8, 8, 4), (ROWS, WIDTH)])
def test_a_tensor_without_clear_positions_is_refused(shape: tuple[int, ...]) -> None:
    rank = Rank(length=16, cp=2, cp_rank=0, split="zigzag")
    with rank.drawing(), pytest.raises(NotBuiltError, match="cannot be assigned to positions"):
        F.dropout(torch.ones(shape), 0.5)


def test_attention_dropout_of_a_models_own_call_is_refused() -> None:
    x = torch.ones(ROWS, 2, 8, WIDTH)
    with (
        Rank(length=16, cp=2, cp_rank=0, split="zigzag").drawing(),
        pytest.raises(NotBuiltError, match="outside of the attention interface"),
    ):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def test_tokens_of_rows_that_have_no_sequence_are_refused() -> None:
    layout = ActivationLayout(place=0, degree=2, sequence_parallel=True, now="stream")
    assert [dim for dim, _ in layout.of((8, WIDTH))] == [0]
    with pytest.raises(NotBuiltError, match="other masks with sequence parallel"):
        layout.of((1, WIDTH))


@pytest.mark.parametrize(
    ("name", "ulysses", "error"),
    [("ring", 1, NotBuiltError), ("gather", 2, NotBuiltError), ("gather", 1, RuntimeError)],
)
def test_attention_dropout_without_whole_masks_is_refused(
    name: Any, ulysses: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring never has whole rows of scores, groups neither; outside of a seeded forward nothing draws by row."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _group: 2 * ulysses)
    monkeypatch.setattr("torch.distributed.get_rank", lambda _group: 0)
    ranks: Any = object()
    groups = ContextGroups(ranks, ranks if ulysses > 1 else None, ranks)
    attention = ContextAttention(
        ContextParallel(attention=name, ulysses=ulysses), groups, F.scaled_dot_product_attention,
        name="layers.0.attention", is_fused=True, keeps_gathered=False, attending=Attending(),
    )  # fmt: skip
    x = torch.ones(1, 2, 8, WIDTH)
    with pytest.raises(error, match=r"layers\.0\.attention drops") as caught:
        attention(nn.Identity(), x, x, x, None, dropout=0.1)
    if isinstance(caught.value, NotBuiltError):
        assert ("ulysses = 1" if ulysses > 1 else "'gather'") in str(caught.value.hint)
