"""Saved activations of a rank's blocks per micro-batch, and tensors that recompute restores, for every plan.

| block                  | saved                                    | restored in its backward |
| ---------------------- | ---------------------------------------- | ------------------------ |
| eager                  | tensors that autograd saves              | nothing                  |
| compiled               | operands and outputs of matmuls          | nothing                  |
| selectively recomputed | its input, outputs of linears, attention | the rest                 |
| fully recomputed       | its input                                | all but its input        |
| … input partitioned    | 1 / tp of its input                      | all                      |
| … input on the host    | nothing but two inputs in all            | all but its input        |
| tensors on the host    | nothing but one such block in all        | nothing                  |
| … MLP in chunks        | as above without what is inside the MLP  | of one chunk, in any     |

Of blocks whose tensors are on the host, the last one of the forward stays; in the backward the next one returns while
one is used (engine/activations/kept_tensors.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.mixture import offloaded_before
from weft.plan.columns import Bools, Floats
from weft.plan.ep.memory import saved_extra
from weft.plan.memory.block_activations import (
    bytes_of,
    saved_by_compiled,
    saved_by_default,
    saved_by_full,
    saved_by_selective,
    wide_stream,
)
from weft.plan.memory.recompute import Recomputed
from weft.plan.memory.sequence_chunks import chunk_share, inside_mlps, is_chunked
from weft.plan.view import View, is_compiled

INPUTS_ON_DEVICE = 2  # of recomputed blocks whose inputs are on the host: the one in use and the next


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Bytes per block, of the largest kind on the rank, by recompute policy."""

    none: Floats
    selective: Floats
    full: Floats
    restored_selective: Floats
    restored_full: Floats
    chunk: Floats  # inside the MLP, of the chunk that is computed again


@dataclass(frozen=True, kw_only=True)
class SavedBlocks:
    """Saved activations of one micro-batch. `done`: number of blocks whose backward is finished, last blocks first."""

    recomputed: Recomputed
    total: Floats  # of all blocks on the rank, on the device
    block: BlockBytes
    away: Floats  # inputs of recomputed blocks on the host
    arrived: Floats  # inputs on the device if the others are away: the one in use and the next
    tensors_away: Floats  # saved tensors of further blocks on the host
    tensors_here: Floats  # of them, on the device between forward and backward

    def freed(self, done: Floats) -> Floats:
        """Bytes freed by the last `done` blocks."""
        full, selective = self.recomputed.finished(done)
        block = self.block
        inputs = np.where(self.arrived > 0, 0.0, block.full)
        kept = done - full - selective
        return (kept - self._returning(done)) * block.none + selective * block.selective + full * inputs

    def _returning(self, done: Floats) -> Floats:
        """Of the finished blocks that are not recomputed, those whose tensors were on the host; less those that have
        returned for the next blocks, beyond the one that was there from the start."""
        number, held = self.recomputed.columns.offload_blocks, self.num_kept
        if not np.any(number):
            return np.zeros(len(done))
        left = [held - _kept(self.recomputed, done + more) for more in (0, 1)]
        remaining, after = (offloaded_before(np.maximum(one, 0), num_kept=held, number=number) for one in left)
        is_used = remaining > after  # by the current block, while the one before returns
        here = np.minimum(remaining, np.where(is_used, 2, 1))
        return (number - remaining) + here - np.minimum(number, 1)

    @property
    def num_kept(self) -> Floats:
        """Blocks of the rank that are not recomputed."""
        return self.recomputed.held - self.recomputed.num_full - self.recomputed.num_selective

    def restored(self, done: Floats) -> Floats:
        """Bytes that recompute restores for the current block, and for a chunk of its MLP."""
        full, selective = self._current(done)
        return full * self.block.restored_full + selective * self.block.restored_selective + self.block.chunk

    def is_recomputed(self, done: Floats) -> Bools:
        """Whether the current block is recomputed."""
        full, selective = self._current(done)
        return full + selective > 0

    def casts_freed(self, done: Floats) -> Floats:
        """Number of finished blocks that held casts of their weights; recomputed blocks cast again."""
        full, selective = self.recomputed.finished(done)
        return done - full - selective

    def _current(self, done: Floats) -> tuple[Floats, Floats]:
        before, after = self.recomputed.finished(done), self.recomputed.finished(done + 1)
        return after[0] - before[0], after[1] - before[1]


def _kept(recomputed: Recomputed, done: Floats) -> Floats:
    """Of the last `done` blocks, those that are not recomputed."""
    done = np.minimum(done, recomputed.held)
    full, selective = recomputed.finished(done)
    return done - full - selective


def saved_blocks(view: View) -> SavedBlocks:
    """Saved activations of the blocks on the rank of `view`."""
    columns, stage, tokens = view.columns, view.stage, view.tokens
    shape, c, recomputed = view.shape, view.sizes.activation, view.stage.recomputed
    h = shape.hidden_size
    keys = np.full(len(columns), float(view.request.workload.sequence_length))
    total, away, none_bytes = (np.zeros(len(columns)) for _ in range(3))
    is_away = columns.offload_activations > 0
    largest = [np.zeros(len(columns)) for _ in range(6)]
    for index, block in enumerate(shape.kinds):
        writes_scores = block.attention is not None and view.request.writes_scores(block.attention)
        default, selected, compiled = (
            saved_by(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=h)
            for saved_by in (saved_by_default, saved_by_selective, saved_by_compiled)
        )
        wide = wide_stream(block, more_bytes=view.sizes.residual - c, hidden_size=h)
        default, selected = default + wide.norms, selected + wide.input
        inputs = saved_by_full(compute_bytes=view.sizes.residual, hidden_size=h)
        default_bytes, selected_bytes, compiled_bytes, input_bytes = (
            bytes_of(saved, block, columns, tokens=tokens, keys=keys) for saved in (default, selected, compiled, inputs)
        )
        # each tensor-parallel rank keeps its share of an input that all of them have
        input_bytes = input_bytes / np.where(columns.partition_inputs > 0, columns.tp, 1)
        selected_bytes = np.minimum(selected_bytes, default_bytes)
        # a compiled block saves operands and outputs of matmuls, and recomputes pointwise operators between them
        compiled_bytes = np.minimum(compiled_bytes, default_bytes)
        inside = inside_mlps(block, compute_bytes=c)
        inside_bytes = is_chunked(view) * bytes_of(inside, block, columns, tokens=tokens, keys=keys)
        default_bytes = default_bytes - inside_bytes
        own_bytes = np.where(is_compiled(view.request, columns), compiled_bytes, default_bytes) + saved_extra(
            view, block
        )
        count, full, selective = stage.blocks[:, index], recomputed.full[:, index], recomputed.selective[:, index]
        total = total + (count - full - selective) * own_bytes + selective * selected_bytes
        none_bytes = none_bytes + (count - full - selective) * own_bytes
        total = total + full * np.where(is_away, 0.0, input_bytes)
        away = away + full * np.where(is_away, input_bytes, 0.0)
        # a gathered input is beside the rank's share of it
        kept_bytes = np.where(columns.partition_inputs > 0, 0.0, input_bytes)
        restored = (own_bytes - selected_bytes, own_bytes - kept_bytes)
        per_block = (own_bytes, selected_bytes, input_bytes, *restored, inside_bytes * chunk_share(view))
        largest = [np.where(count > 0, np.maximum(*pair), pair[0]) for pair in zip(largest, per_block, strict=True)]
    none, selective, full, restored_selective, restored_full, chunk = largest
    block_bytes = BlockBytes(
        none=none,
        selective=selective,
        full=full,
        restored_selective=restored_selective,
        restored_full=restored_full,
        chunk=chunk,
    )
    number, held = columns.offload_blocks, recomputed.held - recomputed.num_full - recomputed.num_selective
    tensors_away = none_bytes / np.maximum(held, 1) * np.minimum(number, held)
    tensors_here = np.where(number > 0, none, 0.0)
    arrived = np.where(is_away, np.minimum(recomputed.num_full, INPUTS_ON_DEVICE) * full, 0.0)
    return SavedBlocks(
        recomputed=recomputed, total=total - tensors_away, block=block_bytes, away=away, arrived=arrived,
        tensors_away=tensors_away, tensors_here=tensors_here,
    )  # fmt: skip
