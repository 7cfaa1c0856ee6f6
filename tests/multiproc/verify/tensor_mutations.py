"""Realistic bugs of tensor parallelism, as `mutations` has those of data parallelism: each trains, and wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mutations import replaced

import weft.checkpoint.staging
import weft.engine.optim.clip
import weft.engine.tp.apply
import weft.engine.tp.chunked_loss
import weft.engine.tp.context
import weft.engine.tp.cross_entropy
import weft.engine.tp.one_d
import weft.engine.tp.one_d_shards
from weft.checkpoint.parts import ShardTensor
from weft.checkpoint.store import CheckpointStore
from weft.core import axes
from weft.core.shards import Span
from weft.data.loader import Loader
from weft.engine import collectives
from weft.engine.activations.slices import EvenSlice
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.chunked_loss import HeadShard
from weft.engine.tp.context import TPContext
from weft.engine.tp.one_d import _Head, _Passage, _Row, _SequenceParallel, _Table

# --- into regions and out of them -------------------------------------------------------------------------------------


def entry_without_sum_in_backward() -> Any:
    return replaced(_Passage, "_full_input", lambda _: lambda self, x: x)


def exit_without_sum() -> Any:
    """In attention alone."""

    def make(original: Any) -> Any:
        def leave(self: _Passage, partial: torch.Tensor) -> torch.Tensor:
            if self.region.kind != "attention":
                return original(self, partial)  # type: ignore[no-any-return]
            self.entered = None
            self.activations.leave()
            return partial

        return leave

    return replaced(_Passage, "leave", make)


def bias_added_by_every_rank() -> Any:
    def call(self: _Row, _forward: Any, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.module.weight if self.is_transposed else F.linear(x, self.module.weight)
        return self.passage.leave(product + self.module.bias)

    return replaced(_Row, "__call__", lambda _: call)


def routing_weights_do_not_enter() -> Any:
    """Experts sum the gradient of their tokens and forget that of the weights that the router gives them."""

    def make(_: Any) -> Any:
        def enter_all(self: _Passage, forward: Any, hidden: torch.Tensor, *rest: Any, **named: Any) -> Any:
            self.activations.enter()
            return forward(self._full_input(hidden), *rest, **named)

        return enter_all

    return replaced(_Passage, "enter_all", make)


def statistics_of_own_features() -> Any:
    """A norm over cut features takes its mean over a slice of them."""

    def alone(_module: Any, _group: Any, _width: int, **_: Any) -> Any:
        return lambda forward, *args, **kwargs: forward(*args, **kwargs)

    return replaced(weft.engine.tp.one_d, "spanning", lambda _: alone)


def statistics_count_every_copy() -> Any:
    """A norm over repeated key-value heads takes them for as many more."""
    return replaced(weft.engine.tp.one_d, "spanning", lambda original: lambda *given, copies: original(*given))


def input_sent_twice() -> Any:
    """Right numbers, and traffic that nobody promised."""

    def make(original: Any) -> Any:
        def make_whole(self: _Passage, x: torch.Tensor) -> torch.Tensor:
            collectives.summed(x, self.group)
            return original(self, x)  # type: ignore[no-any-return]

        return make_whole

    return replaced(_Passage, "_full_input", make)


# --- how parameters are cut -------------------------------------------------------------------------------------------


def fused_projection_cut_as_one() -> Any:
    def partition(segments: Any, *, degree: int, place: int) -> list[Span]:
        size = sum(segment.features for segment in segments) // degree
        return [Span(begin=place * size, size=size)]

    return replaced(weft.engine.tp.one_d_shards, "partition", lambda _: partition)


def kv_heads_dealt_in_turns() -> Any:
    """Ranks 0, 1, 2, 3 hold key-value heads 0, 1, 0, 1 where 0, 0, 1, 1 belong to their queries."""

    def make(original: Any) -> Any:
        def partition(segments: Any, *, degree: int, place: int) -> list[Span]:
            runs = original(segments, degree=degree, place=place)
            for index, segment in enumerate(segments):
                if segment.units < degree:
                    begin = runs[index].begin - place * segment.units // degree * segment.size
                    turn = begin + place % segment.units * segment.size
                    runs[index] = Span(begin=turn, size=segment.size, copies=runs[index].copies)
            return runs  # type: ignore[no-any-return]

        return partition

    return replaced(weft.engine.tp.one_d_shards, "partition", make)


# --- gradients that ranks share ---------------------------------------------------------------------------------------


def left_out_of_the_sum(is_left_out: Callable[[str], bool]) -> Any:
    def make(original: Any) -> Any:
        def sum_partial(parameters: Any, shards: Any, grid: Any) -> None:
            original({name: value for name, value in parameters.items() if not is_left_out(name)}, shards, grid)

        return sum_partial

    return replaced(weft.engine.tp.context, "sum_partial_gradients", make)


def norms_not_summed_over_the_stream() -> Any:
    return left_out_of_the_sum(lambda name: "layernorm" in name)


def q_norm_not_summed() -> Any:
    return left_out_of_the_sum(lambda name: "q_norm" in name)


def repeated_kv_heads_not_summed() -> Any:
    return left_out_of_the_sum(lambda name: "k_proj" in name or "v_proj" in name)


def norm_counts_cut_parameters_once() -> Any:
    """The gradient norm of a rank's own shards: other ranks' shards are missing."""

    def make(original: Any) -> Any:
        def owned(gradient: Any, sharded: Any, shard: Any) -> Any:
            return [
                ((tuple(axis for axis in names if axis != axes.TP), copies), own)
                for (names, copies), own in original(gradient, sharded, shard)
            ]

        return owned

    return replaced(weft.engine.optim.clip, "_owned", make)


def norm_counts_whole_parameters_by_rank() -> Any:
    def make(original: Any) -> Any:
        def owned(gradient: Any, sharded: Any, shard: Any) -> Any:
            found = original(gradient, sharded, shard)
            return found if shard.is_sharded else [(((*names, axes.TP), copies), own) for (names, copies), own in found]

        return owned

    return replaced(weft.engine.optim.clip, "_owned", make)


# --- vocabulary -------------------------------------------------------------------------------------------------------


def table_of_the_next_rank() -> Any:
    """A token is looked up in the rows that another rank holds."""

    def make(original: Any) -> Any:
        def init(self: _Table, module: Any, grid: Any) -> None:
            chunk = -(-int(module.num_embeddings) // grid.degree)
            original(self, module, grid)
            self.first = (grid.rank + 1) % grid.degree * chunk

        return init

    return replaced(_Table, "__init__", make)


def foreign_tokens_not_zeroed() -> Any:
    def call(self: _Table, forward: Any, ids: torch.Tensor) -> torch.Tensor:
        return collectives.leave(forward((ids - self.first).clamp(0, self.rows - 1)), self.group)

    return replaced(_Table, "__call__", lambda _: call)


def head_input_not_summed() -> Any:
    def make(original: Any) -> Any:
        def call(self: _Head, forward: Any, x: torch.Tensor) -> Any:
            with patch.object(collectives, "enter", lambda value, _group: value):
                return original(self, forward, x)

        return call

    return replaced(_Head, "__call__", make)


def logits_not_trimmed() -> Any:
    """The last rank has a token fewer, and its padding stays among the logits."""

    def make(original: Any) -> Any:
        def init(self: _Head, grid: Any, *, vocabulary: int, gathers_logits: bool) -> None:
            original(self, grid, vocabulary=vocabulary, gathers_logits=gathers_logits)
            self.vocabulary = self.chunk * grid.degree

        return init

    return replaced(_Head, "__init__", make)


def loss_of_the_next_token() -> Any:
    return replaced(
        weft.engine.tp.apply, "_first_token", lambda original: lambda *rest: original(*rest) + dist.get_rank()
    )


class _NoLargest:
    """`torch.distributed`, which forgets to compare the ranks' largest."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, *, op: Any = dist.ReduceOp.SUM, group: Any) -> None:
        if op != dist.ReduceOp.MAX:
            dist.all_reduce(tensor, op=op, group=group)


def loss_with_the_largest_of_own_logits() -> Any:
    return replaced(weft.engine.tp.cross_entropy, "dist", lambda _: _NoLargest())


def fused_loss_with_the_largest_of_own_logits() -> Any:
    return replaced(weft.engine.tp.chunked_loss, "dist", lambda _: _NoLargest())


def fused_head_input_not_summed() -> Any:
    """Each rank goes on with its share of the gradient."""
    return replaced(HeadShard, "enter", lambda _: lambda self, hidden: hidden)


def fused_gradient_of_the_own_softmax() -> Any:
    """A slice's probabilities add up to one."""

    def make(original: Any) -> Any:
        def write(*args: Any, shares: torch.Tensor, ones: torch.Tensor) -> None:
            original(*args, shares=(shares > 0).to(shares), ones=ones)

        return write

    return replaced(weft.engine.tp.chunked_loss, "_write_gradients", make)


def loss_counted_by_every_rank() -> Any:
    return replaced(TPContext, "owns_loss", lambda _: property(lambda self: True, lambda self, value: None))


def evaluated_tokens_counted_by_every_rank() -> Any:
    return replaced(TPContext, "owns_weight", lambda _: property(lambda self: True))


# --- the stream of sequence parallel ----------------------------------------------------------------------------------


def slice_of_another_rank() -> Any:
    def other(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        size = x.shape[dim] // dist.get_world_size(group)
        turn = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        return x.narrow(dim, turn * size, size).contiguous()

    return replaced(
        collectives, "take", lambda _: lambda *given: collectives._Moved.apply(*given, other, collectives.gathered)
    )


def stream_begins_without_gather_in_backward() -> Any:
    return replaced(
        _SequenceParallel, "_take", lambda _: lambda self, hidden: collectives.own_slice(hidden, self.group, 1)
    )


def stream_ends_with_a_sum_in_backward() -> Any:
    """What every rank repeats after the last block counts as often."""

    def make(original: Any) -> Any:
        def end(self: _SequenceParallel, forward: Any, *args: Any, **kwargs: Any) -> Any:
            with patch.object(collectives, "collect", collectives.gather):
                return original(self, forward, *args, **kwargs)

        return end

    return replaced(_SequenceParallel, "end", make)


# --- dropout and data -------------------------------------------------------------------------------------------------


def masks_not_sliced() -> Any:
    """Every rank draws a mask of its slice's own shape: the first heads' masks, for all."""
    return replaced(ActivationLayout, "shard_dim", lambda _: lambda self, shape: None)


def masks_of_the_first_slice() -> Any:
    def first(self: EvenSlice, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.narrow(dim, 0, whole.shape[dim] // self.degree)

    return replaced(EvenSlice, "take", lambda _: first)


def other_rows_on_the_second_rank() -> Any:
    """Ranks of the tp axis must read the same rows."""
    return replaced(
        Loader, "batch", lambda original: lambda self, position: original(self, position + 8 * dist.get_rank())
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def every_rank_saves_the_first_part() -> Any:
    """Each rank writes its own shard where rank 0's belongs, and nothing where its own does."""

    def make(original: Any) -> Any:
        def staged(self: Any, state: dict[str, torch.Tensor], shards: dict[str, torch.Tensor]) -> None:
            original(self, state, shards)
            for key, tensor in state.items():
                if isinstance(tensor, ShardTensor) and dist.get_rank() > 0:
                    self._shards[key] = torch.zeros_like(self._shards[key])

        return staged

    return replaced(weft.checkpoint.staging.StagedPlanner, "__init__", make)


def part_not_loaded() -> Any:
    key = "model.model.layers.1.mlp.down_proj.weight"

    def make(original: Any) -> Any:
        def load(self: CheckpointStore, state: dict[str, torch.Tensor], **options: Any) -> Any:
            tensor = state[key]
            before = tensor.local.clone() if isinstance(tensor, ShardTensor) else None
            loaded = original(self, state, **options)
            if before is not None and dist.get_rank() == 1:
                tensor.local.copy_(before)  # type: ignore[attr-defined]
            return loaded

        return load

    return replaced(CheckpointStore, "load", make)


def parts_swapped_when_cut_again() -> Any:
    """Only what another layout has saved: the third load of a verification."""
    loads = iter(range(10**9))

    def make(original: Any) -> Any:
        def load(self: CheckpointStore, state: dict[str, torch.Tensor], **options: Any) -> Any:
            loaded = original(self, state, **options)
            if next(loads) == 2:
                first, second = (state[f"model.model.layers.0.mlp.{name}_proj.weight"].local for name in ("gate", "up"))  # type: ignore[attr-defined]
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)
            return loaded

        return load

    return replaced(CheckpointStore, "load", make)
