"""What a rank's blocks keep of a micro-batch for its backward, and what computing again brings back, for every plan.

| a block            | keeps                                    | brings back in its backward |
| ------------------ | ---------------------------------------- | --------------------------- |
| as it is           | what autograd keeps                      | nothing                     |
| compiled           | what its products read and give          | nothing                     |
| selectively again  | its input, products, attention           | the rest                    |
| fully again        | its input                                | all but its input           |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.columns import Bools, Floats
from weft.plan.memory.block_activations import bytes_of, kept_by, kept_compiled, kept_fully, kept_selectively
from weft.plan.memory.recompute import Again
from weft.plan.view import View, is_compiled


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Of one block: the largest kind that the rank holds."""

    none: Floats
    selective: Floats
    full: Floats
    back_selective: Floats
    back_full: Floats


@dataclass(frozen=True, kw_only=True)
class KeptBlocks:
    """A micro-batch's activations in the rank's blocks. `done`: blocks whose backward is over, the last ones first."""

    again: Again
    total: Floats  # of all the rank's blocks
    block: BlockBytes

    def freed(self, done: Floats) -> Floats:
        """What the last `done` blocks had kept."""
        full, selective = self.again.finished(done)
        block = self.block
        return (done - full - selective) * block.none + selective * block.selective + full * block.full

    def brought_back(self, done: Floats) -> Floats:
        """What computing again brings back for the block at work."""
        full, selective = self._at_work(done)
        return full * self.block.back_full + selective * self.block.back_selective

    def is_again(self, done: Floats) -> Bools:
        """Whether the block at work is computed again."""
        full, selective = self._at_work(done)
        return full + selective > 0

    def casts_freed(self, done: Floats) -> Floats:
        """Of the finished blocks, those that kept casts of their weights: a block computed again makes them anew."""
        full, selective = self.again.finished(done)
        return done - full - selective

    @property
    def largest(self) -> Floats:
        """Of one block."""
        again, block = self.again, self.block
        is_left = again.num_full + again.num_selective < again.held
        found = np.where(is_left, block.none, 0.0)
        found = np.maximum(found, np.where(again.num_selective > 0, block.selective, 0.0))
        return np.maximum(found, np.where(again.num_full > 0, block.full, 0.0))

    def _at_work(self, done: Floats) -> tuple[Floats, Floats]:
        before, after = self.again.finished(done), self.again.finished(done + 1)
        return after[0] - before[0], after[1] - before[1]


def kept_blocks(view: View) -> KeptBlocks:
    """What the blocks of the rank that `view` looks at keep."""
    columns, stage, tokens = view.columns, view.stage, view.tokens
    shape, c, again = view.shape, view.sizes.activation, view.stage.again
    keys = np.full(len(columns), float(view.request.workload.sequence_length))
    total = np.zeros(len(columns))
    largest = [np.zeros(len(columns)) for _ in range(5)]
    for index, block in enumerate(shape.kinds):
        writes_scores = block.attention is not None and view.request.writes_scores(block.attention)
        everything, partly, in_graph = (
            kept(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=shape.hidden_size)
            for kept in (kept_by, kept_selectively, kept_compiled)
        )
        input_only = kept_fully(compute_bytes=c, hidden_size=shape.hidden_size)
        whole, selected, compiled, inputs = (
            bytes_of(kept, block, columns, tokens=tokens, keys=keys)
            for kept in (everything, partly, in_graph, input_only)
        )
        selected = np.minimum(selected, whole)
        # a compiled block keeps what its products read and give, and computes what lies between them again
        as_it_is = np.where(is_compiled(view.request, columns), np.minimum(compiled, whole), whole)
        count, full, selective = stage.blocks[:, index], again.full[:, index], again.selective[:, index]
        total = total + (count - full - selective) * as_it_is + selective * selected + full * inputs
        of_block = (as_it_is, selected, inputs, as_it_is - selected, as_it_is - inputs)
        largest = [np.where(count > 0, np.maximum(*pair), pair[0]) for pair in zip(largest, of_block, strict=True)]
    none, selective, full, back_selective, back_full = largest
    block_bytes = BlockBytes(
        none=none, selective=selective, full=full, back_selective=back_selective, back_full=back_full
    )
    return KeptBlocks(again=again, total=total, block=block_bytes)
