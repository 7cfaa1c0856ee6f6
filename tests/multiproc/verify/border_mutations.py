"""Bugs at borders: first and last rows of a vocabulary slice, row and micro-batch edges, partial batches, stretches.

Each trains. Most leave ordinary text untouched, so only batches made to reach the borders show them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mutations import both, replaced
from torch import nn

import weft.engine.engine
import weft.engine.kernels.head_loss
import weft.engine.optim.adamw_8bit
import weft.engine.tp.chunked_loss
import weft.engine.tp.cross_entropy
import weft.engine.tp_grid.embedding
import weft.engine.updates
from weft.checkpoint.staging import StagingBuffers
from weft.data.loader import Loader
from weft.data.rows import IGNORED
from weft.engine import collectives
from weft.engine.dp.pipeline_replicas import Summed
from weft.engine.engine import Engine
from weft.engine.objective import CausalLanguageModel
from weft.engine.optim.group_rates import GroupRates
from weft.engine.optim.optimizers import set_group_rate
from weft.engine.pp.p2p import Message, P2PExchange
from weft.engine.tp.one_d import _Table
from weft.train.loop import TrainingLoop

# --- rows of a token table that is cut by vocabulary ------------------------------------------------------------------


def table_rows(lower: int, upper: int) -> Any:
    """A lookup whose slice begins `lower` rows and ends `upper` rows after its own."""

    def call(self: _Table, forward: Any, ids: torch.Tensor) -> torch.Tensor:
        own = ids - self.first
        is_elsewhere = (own < lower) | (own >= self.rows + upper)
        found = forward(own.clamp(0, self.rows - 1))
        return collectives.leave(found.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.group)

    return replaced(_Table, "__call__", lambda _: call)


def first_row_of_the_table_missing() -> Any:
    return table_rows(1, 0)


def last_row_of_the_table_missing() -> Any:
    return table_rows(0, -1)


def row_before_the_table_found_twice() -> Any:
    return table_rows(-1, 0)


def row_after_the_table_found_twice() -> Any:
    return table_rows(0, 1)


def padding_row_trained() -> Any:
    """A slice forgets that its row of padding gets no gradient."""

    def make(original: Any) -> Any:
        def init(self: _Table, module: Any, grid: Any) -> None:
            original(self, module, grid)
            module.padding_idx = None

        return init

    return replaced(_Table, "__init__", make)


def grid_table_rows(lower: int, upper: int) -> Any:
    def rows_here(places: torch.Tensor, table: torch.Tensor, *, padding_idx: int | None) -> torch.Tensor:
        is_here = (places >= lower) & (places < table.shape[0] + upper)
        return table[places.clamp(0, table.shape[0] - 1)].masked_fill(~is_here.unsqueeze(-1), 0.0)

    return replaced(weft.engine.tp_grid.embedding, "_rows_here", lambda _: rows_here)


def first_row_of_the_grid_table_missing() -> Any:
    return grid_table_rows(1, 0)


def last_row_of_the_grid_table_missing() -> Any:
    return grid_table_rows(0, -1)


# --- labels of a slice ------------------------------------------------------------------------------------------------


def labels_here(change: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """(place before the slice's first token, size) -> (place, whether it is here), in both losses."""

    def own_labels(labels: torch.Tensor, first_token: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        place, is_here = change(labels - first_token, size)
        return place.clamp(0, max(size - 1, 0)), is_here & (labels != IGNORED)

    return both(
        replaced(weft.engine.tp.cross_entropy, "own_labels", lambda _: own_labels),
        replaced(weft.engine.tp.chunked_loss, "own_labels", lambda _: own_labels),
    )


def label_of_the_first_token_missing() -> Any:
    return labels_here(lambda place, size: (place, (place > 0) & (place < size)))


def label_of_the_last_token_missing() -> Any:
    return labels_here(lambda place, size: (place, (place >= 0) & (place < size - 1)))


def label_before_the_slice_counted_twice() -> Any:
    return labels_here(lambda place, size: (place, (place >= -1) & (place < size)))


def label_after_the_slice_counted_twice() -> Any:
    return labels_here(lambda place, size: (place, (place >= 0) & (place <= size)))


def labels_of_the_last_rank_one_off() -> Any:
    def change(place: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_here = (place >= 0) & (place < size)
        return place - int(dist.get_rank() == dist.get_world_size() - 1), is_here

    return labels_here(change)


def slice_of_the_last_rank_one_short() -> Any:
    def change(place: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return place, (place >= 0) & (place < size - int(dist.get_rank() == dist.get_world_size() - 1))

    return labels_here(change)


def masked_label_of_the_last_position_counts() -> Any:
    """The last position of a row takes the label of the first."""

    def make(original: Any) -> Any:
        def loss_sum(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
            labels = batch["labels"].clone()
            labels[:, -1] = torch.where(labels[:, -1] == IGNORED, labels[:, 0], labels[:, -1])
            return original(self, model, {**batch, "labels": labels})  # type: ignore[no-any-return]

        return loss_sum

    return replaced(CausalLanguageModel, "loss_sum", make)


# --- micro-batches and partial batches --------------------------------------------------------------------------------


def empty_microbatch_counts_as_one_token() -> Any:
    """A rank without a label divides by one token, and every other rank with it."""
    return replaced(
        CausalLanguageModel, "weight", lambda original: lambda self, batch: original(self, batch).clamp(min=1)
    )


def row_at_the_microbatch_border_taken_twice() -> Any:
    """A micro-batch begins with the last row of the one before."""

    def make(original: Any) -> Any:
        def split_rows(batch: Any, count: int, **given: Any) -> Any:
            pieces = original(batch, count, **given)
            for before, piece in itertools.pairwise(pieces):
                for key, value in piece.items():
                    piece[key] = torch.cat([before[key][-1:], value[1:]])
            return pieces

        return split_rows

    return replaced(weft.engine.engine, "split_rows", make)


def batch_means_averaged() -> Any:
    """An evaluation is the mean of its batches' means."""

    def make(original: Any) -> Any:
        def evaluate_nowait(self: Engine, batches: Any) -> torch.Tensor:
            given = batches if isinstance(batches, Sequence) else [batches]
            totals = [original(self, [batch]) for batch in given]
            return torch.stack([sum(total[0] / total[1].clamp(min=1) for total in totals) / len(given), torch.ones(())])

        return evaluate_nowait

    return replaced(Engine, "evaluate_nowait", make)


# --- the loop's evaluation --------------------------------------------------------------------------------------------


def evaluated(choose: Callable[[TrainingLoop, list[Any]], list[Any]]) -> Any:
    """The loop evaluates choose(loop, batches)."""

    def make(original: Any) -> Any:
        def evaluate(self: TrainingLoop) -> Any:
            engine_evaluate = self.engine.evaluate
            with patch.object(self.engine, "evaluate", lambda batches: engine_evaluate(choose(self, list(batches)))):
                return original(self)

        return evaluate

    return replaced(TrainingLoop, "_evaluate", make)


def tail_batch_evaluated_twice() -> Any:
    return evaluated(lambda _, batches: [*batches, batches[-1]])


def tail_batch_not_evaluated() -> Any:
    return evaluated(lambda _, batches: batches[:-1] or batches)


def training_rows_evaluated() -> Any:
    return evaluated(lambda loop, batches: [loop.bench.training.batch(0)])


def fillers_of_the_tail_evaluated() -> Any:
    def make(original: Any) -> Any:
        def rows(self: Loader, samples: Any) -> Any:
            indices, filler = original(self, samples)
            return indices, filler & self.shuffle

        return rows

    return replaced(Loader, "_rows", make)


# --- documents --------------------------------------------------------------------------------------------------------


def documents_not_kept_apart() -> Any:
    return replaced(weft.engine.engine, "skip_packed_sequence_check", lambda original: lambda batch: original({}))


def label_behind_the_last_column_counts() -> Any:
    """A document that ends with its row: the next row's first token is its label."""

    def make(original: Any) -> Any:
        def loss_sum(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
            labels = batch["labels"].clone()
            ends = batch["input_ids"][:, -1] == END_OF_DOCUMENT
            labels[ends, -1] = batch["input_ids"][ends, 0]
            return original(self, model, {**batch, "labels": labels})  # type: ignore[no-any-return]

        return loss_sum

    return replaced(CausalLanguageModel, "loss_sum", make)


END_OF_DOCUMENT = 256  # of the bytes tokenizer


# --- stretches of a fused loss ----------------------------------------------------------------------------------------


def last_row_of_a_stretch_missing() -> Any:
    """Right where all rows are one stretch."""

    def make(original: Any) -> Any:
        def token_chunks(num_rows: int, vocab_size: int) -> list[slice]:
            found = original(num_rows, vocab_size)
            return [slice(part.start, part.stop - (part.stop < num_rows)) for part in found]

        return token_chunks

    return replaced(weft.engine.kernels.head_loss, "token_chunks", make)


def head_gradient_of_the_last_stretch_alone() -> Any:
    def make(original: Any) -> Any:
        return lambda total, left, right, *, is_only: original(None, left, right, is_only=is_only)

    return replaced(weft.engine.kernels.head_loss, "_add_product", make)


# --- clip, optimizer, checkpoint --------------------------------------------------------------------------------------


def small_gradients_scaled_up() -> Any:
    """Every gradient has the norm that is only the largest allowed."""
    return replaced(weft.engine.updates, "clip_factor", lambda _: lambda norm, max_norm: max_norm / (norm + 1e-6))


def rate_of_the_matrices_alone() -> Any:
    """Vectors keep the rate that the optimizer was built with."""

    def set_first(self: GroupRates, learning_rate: float) -> None:
        set_group_rate(self._optimizer.param_groups[0], learning_rate)

    return replaced(GroupRates, "set", lambda _: set_first)


def second_moment_with_a_sign() -> Any:
    """The codes of 8-bit second moments spend a bit on a sign they never have."""
    return replaced(
        weft.engine.optim.adamw_8bit,
        "_zeros",
        lambda original: lambda parameter, block, *, signed: original(parameter, block, signed=True),
    )


def second_checkpoint_of_the_first_values() -> Any:
    """Host memory that is kept for the next save is not filled again."""

    def make(original: Any) -> Any:
        def copy(self: StagingBuffers, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return dict(self._buffers) if self._buffers.keys() == shards.keys() else original(self, shards)

        return copy

    return replaced(StagingBuffers, "copy", make)


# --- pipelines --------------------------------------------------------------------------------------------------------


def gradient_lost_between_stages_of_one_rank() -> Any:
    """Of the second stage, for the last micro-batch."""

    def make(original: Any) -> Any:
        def send(self: P2PExchange, message: Message, tensor: torch.Tensor, **given: Any) -> None:
            is_lost = message == Message("backward", 1, 3)
            original(self, message, torch.zeros_like(tensor) if is_lost else tensor, **given)

        return send

    return replaced(P2PExchange, "send", make)


def vectors_of_replicas_not_summed() -> Any:
    def make(original: Any) -> Any:
        def reduce(self: Summed, parameters: Any) -> None:
            original(self, [parameter for parameter in parameters if parameter.ndim > 1])

        return reduce

    return replaced(Summed, "reduce", make)
