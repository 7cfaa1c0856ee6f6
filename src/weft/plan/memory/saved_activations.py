"""Saved activations of a rank's blocks per micro-batch, and tensors that recompute restores, for every plan.

| block                  | saved                                    | restored in its backward |
| ---------------------- | ---------------------------------------- | ------------------------ |
| eager                  | tensors that autograd saves              | nothing                  |
| compiled               | operands and outputs of matmuls          | nothing                  |
| selectively recomputed | its input, outputs of linears, attention | the rest                 |
| fully recomputed       | its input                                | all but its input        |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.columns import Bools, Floats
from weft.plan.ep.memory import saved_extra
from weft.plan.memory.block_activations import (
    bytes_of,
    saved_by_compiled,
    saved_by_default,
    saved_by_full,
    saved_by_selective,
)
from weft.plan.memory.recompute import Recomputed
from weft.plan.view import View, is_compiled


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Bytes per block, of the largest kind on the rank, by recompute policy."""

    none: Floats
    selective: Floats
    full: Floats
    restored_selective: Floats
    restored_full: Floats


@dataclass(frozen=True, kw_only=True)
class SavedBlocks:
    """Saved activations of one micro-batch. `done`: number of blocks whose backward is finished, last blocks first."""

    recomputed: Recomputed
    total: Floats  # of all blocks on the rank
    block: BlockBytes

    def freed(self, done: Floats) -> Floats:
        """Bytes freed by the last `done` blocks."""
        full, selective = self.recomputed.finished(done)
        block = self.block
        return (done - full - selective) * block.none + selective * block.selective + full * block.full

    def restored(self, done: Floats) -> Floats:
        """Bytes that recompute restores for the current block."""
        full, selective = self._current(done)
        return full * self.block.restored_full + selective * self.block.restored_selective

    def is_recomputed(self, done: Floats) -> Bools:
        """Whether the current block is recomputed."""
        full, selective = self._current(done)
        return full + selective > 0

    def casts_freed(self, done: Floats) -> Floats:
        """Number of finished blocks that held casts of their weights; recomputed blocks cast again."""
        full, selective = self.recomputed.finished(done)
        return done - full - selective

    @property
    def largest(self) -> Floats:
        """Bytes of the largest block."""
        recomputed, block = self.recomputed, self.block
        is_left = recomputed.num_full + recomputed.num_selective < recomputed.held
        found = np.where(is_left, block.none, 0.0)
        found = np.maximum(found, np.where(recomputed.num_selective > 0, block.selective, 0.0))
        return np.maximum(found, np.where(recomputed.num_full > 0, block.full, 0.0))

    def _current(self, done: Floats) -> tuple[Floats, Floats]:
        before, after = self.recomputed.finished(done), self.recomputed.finished(done + 1)
        return after[0] - before[0], after[1] - before[1]


def saved_blocks(view: View) -> SavedBlocks:
    """Saved activations of the blocks on the rank of `view`."""
    columns, stage, tokens = view.columns, view.stage, view.tokens
    shape, c, recomputed = view.shape, view.sizes.activation, view.stage.recomputed
    keys = np.full(len(columns), float(view.request.workload.sequence_length))
    total = np.zeros(len(columns))
    largest = [np.zeros(len(columns)) for _ in range(5)]
    for index, block in enumerate(shape.kinds):
        writes_scores = block.attention is not None and view.request.writes_scores(block.attention)
        default, selected, compiled = (
            saved_by(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=shape.hidden_size)
            for saved_by in (saved_by_default, saved_by_selective, saved_by_compiled)
        )
        inputs = saved_by_full(compute_bytes=c, hidden_size=shape.hidden_size)
        default_bytes, selected_bytes, compiled_bytes, input_bytes = (
            bytes_of(saved, block, columns, tokens=tokens, keys=keys) for saved in (default, selected, compiled, inputs)
        )
        selected_bytes = np.minimum(selected_bytes, default_bytes)
        # a compiled block saves operands and outputs of matmuls, and recomputes pointwise operators between them
        compiled_bytes = np.minimum(compiled_bytes, default_bytes)
        own_bytes = np.where(is_compiled(view.request, columns), compiled_bytes, default_bytes) + saved_extra(
            view, block
        )
        count, full, selective = stage.blocks[:, index], recomputed.full[:, index], recomputed.selective[:, index]
        total = total + (count - full - selective) * own_bytes + selective * selected_bytes + full * input_bytes
        restored = (own_bytes - selected_bytes, own_bytes - input_bytes)
        per_block = (own_bytes, selected_bytes, input_bytes, *restored)
        largest = [np.where(count > 0, np.maximum(*pair), pair[0]) for pair in zip(largest, per_block, strict=True)]
    none, selective, full, restored_selective, restored_full = largest
    block_bytes = BlockBytes(
        none=none, selective=selective, full=full, restored_selective=restored_selective, restored_full=restored_full
    )
    return SavedBlocks(recomputed=recomputed, total=total, block=block_bytes)
