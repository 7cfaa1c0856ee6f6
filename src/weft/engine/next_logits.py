"""Logits of the next token under the engine's own layout, for texts that are sampled during a training.

Rows are computed in full for each token, without a cache of keys and values: the forward of an evaluation, in every
layout whose ranks all see the logits. A padded position never changes an earlier one, so rows of any length share one
call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.engine.objective import Batch, CausalLanguageModel, is_hugging_face, logits_of

if TYPE_CHECKING:
    from weft.engine.engine import Engine

ROW_UNIT = 64  # a row has a multiple of this: float8 kernels and sequence-parallel ranks divide it


class _LogitsReader(CausalLanguageModel):
    """Reads the logits in place of a loss."""

    def __init__(self, lengths: Sequence[int], *, takes_keywords: bool) -> None:
        super().__init__()
        self._lengths, self._takes_keywords = lengths, takes_keywords
        self.found: torch.Tensor | None = None

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        output = model(input_ids=ids, use_cache=False) if self._takes_keywords else model(ids)
        rows = torch.arange(len(ids), device=ids.device)
        last = torch.tensor(self._lengths, device=ids.device) - 1
        self.found = logits_of(output)[rows, last].float()
        return self.found.new_zeros(())


@torch.no_grad()
def last_logits(engine: Engine, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """See `Engine.next_logits`."""
    unit = math.lcm(ROW_UNIT, engine.plan.mesh.tp)
    rows = nn.functional.pad(ids, (0, -ids.shape[1] % unit)).to(engine.device)
    reader = _LogitsReader(lengths, takes_keywords=is_hugging_face(engine.model))
    engine.model.eval()
    try:
        # of another shape than training rows: no block is compiled for it
        with torch.compiler.set_stance("force_eager"):
            engine.loss_sum({"input_ids": rows}, objective=reader)
    finally:
        engine.model.train()
        engine.strategy.after_evaluation()
    engine.buffer_sync.synchronise()
    assert reader.found is not None
    logits = reader.found
    for context in engine.axes:
        logits = context.full_logits(logits)
    return logits
