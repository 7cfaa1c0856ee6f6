"""Masks of a rank's queries: what cannot be right is refused in a sentence."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers.masking_utils  # the context looks it up

from weft.core.errors import ModelError
from weft.core.plan import ContextParallel
from weft.engine.cp.context import CPContext
from weft.engine.cp.masks import MASKS, WholeRows
from weft.engine.cp.positions import Positions
from weft.engine.mesh import ContextGroups

LENGTH = 8


def rows_of(positions: Positions, **batch: Any) -> WholeRows:
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    return WholeRows.of({"input_ids": ids, **batch}, positions, lambda _given: None)


def test_a_mask_of_the_batch_is_that_of_whole_rows() -> None:
    positions = Positions(length=LENGTH + 4, degree=2, rank=1, split="contiguous")
    given = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]])
    rows = rows_of(positions, attention_mask=given)
    whole = rows.whole_mask(given[:, :6])
    assert whole is not None
    assert whole.tolist() == [[*given[0].tolist(), 0, 0, 0, 0]]
    assert rows.whole_mask(None) is None


def test_a_mask_of_the_model_hides_nothing_or_is_refused() -> None:
    rows = rows_of(Positions(length=LENGTH, degree=2, rank=0, split="zigzag"))
    assert rows.whole_mask(torch.ones(1, LENGTH // 2)) is None
    with pytest.raises(ModelError, match="hides positions by a mask of its own"):
        rows.whole_mask(torch.tensor([[1, 0, 1, 1]]))


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> CPContext:
    """Of the first of two ranks."""
    assert sys.modules[MASKS] is transformers.masking_utils
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _group: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda _group: 0)
    groups = ContextGroups(None, None, None)  # type: ignore[arg-type]
    made = CPContext(ContextParallel(), groups, inner="sdpa", multiple=1, masks_in_pieces=False)
    positions = Positions(length=LENGTH, degree=2, rank=0, split="zigzag")
    made._rows = rows_of(positions)
    return made


@pytest.mark.parametrize(("window", "has_mask"), [(LENGTH - 1, True), (LENGTH, True), (LENGTH + 1, False)])
def test_a_mask_exists_where_one_process_has_one(context: CPContext, window: int, has_mask: bool) -> None:
    """Another kernel would draw other masks of dropout."""
    masks = transformers.masking_utils
    window_function = masks.sliding_window_causal_mask_function(window)
    given = {"batch_size": 1, "mask_function": window_function, "local_size": window}
    whole = masks.sdpa_mask(q_length=LENGTH, kv_length=LENGTH, **given)
    assert [each is not None for each in (whole, context.mask(masks.sdpa_mask, **given))] == [has_mask] * 2


def test_a_mask_function_over_a_ranks_own_positions_is_refused(context: CPContext) -> None:
    kinds = torch.zeros(1, LENGTH // 2)

    def by_kind(b: Any, _h: Any, q: Any, k: Any) -> Any:
        return kinds[b, q] == kinds[b, k]

    with pytest.raises(ModelError, match="reads a tensor of one rank's positions"):
        context.mask(transformers.masking_utils.sdpa_mask, batch_size=1, mask_function=by_kind)
