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


def test_a_mask_function_over_a_ranks_own_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sys.modules[MASKS] is transformers.masking_utils
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _group: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda _group: 0)
    groups = ContextGroups(None, None, None)  # type: ignore[arg-type]
    context = CPContext(ContextParallel(), groups, inner="sdpa", multiple=1)
    positions = Positions(length=LENGTH, degree=2, rank=0, split="zigzag")
    context._rows = WholeRows(positions=positions, length=LENGTH, documents=None)
    kinds = torch.zeros(1, LENGTH // 2)

    def by_kind(b: Any, _h: Any, q: Any, k: Any) -> Any:
        return kinds[b, q] == kinds[b, k]

    with pytest.raises(ModelError, match="reads a tensor of one rank's positions"):
        context.mask(transformers.masking_utils.sdpa_mask, batch_size=1, mask_function=by_kind)
