"""Realistic bugs, each as a context manager that puts it where such a bug would live and takes it out again.

Every one is the kind that trains without an error and gives wrong numbers. They are applied inside the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import weft.engine.activations.recompute
import weft.engine.apply
import weft.engine.dp.ddp
import weft.engine.dp.sharded
import weft.engine.engine
import weft.engine.kernels.cross_entropy
import weft.engine.kernels.float8
import weft.engine.kernels.head_loss
import weft.engine.objective
import weft.engine.optim.clip
import weft.engine.optim.optimizers
import weft.engine.updates
import weft.models.initial
import weft.train.export
import weft.train.loop
import weft.train.trained_tensors
import weft.train.worker
from weft.checkpoint.store import CheckpointStore
from weft.data.loader import Loader
from weft.engine.activations.dropout import _RowDropout
from weft.engine.dp.sharded import STAGES, Sharded
from weft.engine.engine import Engine
from weft.engine.objective import CausalLanguageModel
from weft.engine.ownership import local
from weft.engine.precision import _CastUnit
from weft.engine.updates import Updates
from weft.train.loop import TrainingLoop

EMBEDDING = "model.embed_tokens.weight"
NORM, FIRST_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` replaced by make(original)."""
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


# --- loss and its division --------------------------------------------------------------------------------------------


def loss_divided_twice() -> Any:
    def make(original: Any) -> Any:
        return lambda self, model, batch: original(self, model, batch) / 2  # of two micro-batches

    return replaced(CausalLanguageModel, "loss_sum", make)


def mean_of_means_over_ranks() -> Any:
    def make(original: Any) -> Any:
        def sum_over(values: torch.Tensor, group: Any) -> torch.Tensor:
            is_count = not values.is_floating_point()
            return values * dist.get_world_size(group) if is_count else original(values, group)

        return sum_over

    return replaced(weft.engine.engine, "sum_over", make)


def token_count_of_one_rank() -> Any:
    def make(original: Any) -> Any:
        def sum_over(values: torch.Tensor, group: Any) -> torch.Tensor:
            is_count = not values.is_floating_point()
            return values if is_count else original(values, group)

        return sum_over

    return replaced(weft.engine.engine, "sum_over", make)


def labels_shifted_twice() -> Any:
    def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.float().flatten(0, -2), shifted.flatten(), ignore_index=-100, reduction="sum")

    return replaced(weft.engine.objective, "token_loss_sum", lambda _: token_loss_sum)


def padding_counted_as_tokens() -> Any:
    return replaced(CausalLanguageModel, "weight", lambda _: lambda self, batch: torch.tensor(batch["labels"].numel()))


def loss_divided_by_the_cut() -> Any:
    """Right with one micro-batch, wrong with any other number."""

    def make(original: Any) -> Any:
        def split(self: Engine, batch: Any) -> Any:
            pieces = original(self, batch)
            self.objective.num_cuts = len(pieces)  # type: ignore[attr-defined]
            return pieces

        return split

    def divided(original: Any) -> Any:
        return lambda self, model, batch: original(self, model, batch) / self.num_cuts

    return both(replaced(Engine, "split", make), replaced(CausalLanguageModel, "loss_sum", divided))


# --- gradients and their reduction ------------------------------------------------------------------------------------


def last_microbatch_without_gradient() -> Any:
    def make(original: Any) -> Any:
        calls = iter(range(10**9))

        def loss_sum(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
            loss = original(self, model, batch)
            is_last = torch.is_grad_enabled() and next(calls) % 2 == 1
            return loss.detach() + 0.0 * loss if is_last else loss

        return loss_sum

    return replaced(CausalLanguageModel, "loss_sum", make)


def sum_reduced_as_mean() -> Any:
    def make(original: Any) -> Any:
        def mean_over_ranks(state, bucket):  # no annotations: DDP compares them with the classes themselves
            return original(state, bucket).then(lambda future: future.value().div_(state.sums.group.size()))

        return mean_over_ranks

    return replaced(weft.engine.dp.ddp, "_sum_over_ranks", make)


def tied_weight_not_reduced() -> Any:
    def make(original: Any) -> Any:
        def init(self: Any, model: nn.Module, **kwargs: Any) -> None:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [EMBEDDING, "lm_head.weight"])
            original(self, model, **kwargs)

        return init

    return replaced(weft.engine.dp.ddp.Replicated, "__init__", make)


def replicas_not_reduced() -> Any:
    def make(original: Any) -> Any:
        return lambda self, *_args, **kwargs: original(self, False, **kwargs)

    return replaced(FSDPModule, "set_requires_all_reduce", make)


def gradients_sent_in_bfloat16() -> Any:
    return replaced(
        weft.engine.dp.sharded,
        "MixedPrecisionPolicy",
        lambda _: lambda **given: MixedPrecisionPolicy(**{**given, "reduce_dtype": torch.bfloat16}),
    )


def gradients_kept_in_bfloat16() -> Any:
    """In a bf16 run, where gradients are promised in float32: far inside the distance to the float64 truth."""

    def make(original: Any) -> Any:
        def show(self: Engine) -> None:
            for parameter in self.parameters:
                gradient = local(parameter.grad)  # type: ignore[arg-type]
                gradient.copy_(gradient.bfloat16())
            original(self)

        return show

    return replaced(Engine, "show_gradients", make)


# --- norm, clipping, optimizer ----------------------------------------------------------------------------------------


def norm_of_one_shard() -> Any:
    return replaced(weft.engine.optim.clip, "sum_over", lambda _: lambda values, group: values)


def replicated_norm_summed() -> Any:
    def make(original: Any) -> Any:
        def global_norm(parameters: Any, topology: Any, **rest: Any) -> torch.Tensor:
            square = original(parameters, topology, **rest).square()
            dist.all_reduce(square, group=topology.dp_group)
            return square.sqrt()

        return global_norm

    return replaced(weft.engine.engine, "global_norm", make)


def clipped_by_own_norm() -> Any:
    def make(original: Any) -> Any:
        def scale(parameters: Any, factor: torch.Tensor) -> None:
            own = torch.nn.utils.get_total_norm([local(parameter.grad) for parameter in parameters])
            original(parameters, torch.clamp(0.25 / (own + 1e-6), max=1.0))

        return scale

    return replaced(weft.engine.updates, "scale_gradients", make)


def not_clipped() -> Any:
    return replaced(weft.engine.updates, "clip_factor", lambda _: lambda norm, max_norm: torch.ones_like(norm))


def loss_scale_left_in() -> Any:
    def make(original: Any) -> Any:
        def scale(parameters: Any, factor: torch.Tensor) -> None:
            if factor.item() != 2.0**-10:  # the verification's own loss scale
                original(parameters, factor)

        return scale

    return replaced(weft.engine.updates, "scale_gradients", make)


def vectors_decay_too() -> Any:
    return replaced(
        weft.engine.optim.optimizers,
        "decay_groups",
        lambda _: lambda parameters, decay: [{"params": list(parameters), "weight_decay": decay}],
    )


def frozen_parameter_decays() -> Any:
    def make(original: Any) -> Any:
        def update(self: Updates) -> Any:
            with torch.no_grad():
                self.engine.model.get_parameter(NORM).mul_(1 - 1e-4)
            return original(self)

        return update

    return replaced(Updates, "_update", make)


def frozen_parameter_trained() -> Any:
    return replaced(weft.engine.apply, "freeze", lambda _: lambda model, patterns: None)


def last_update_lost_on_one_replica() -> Any:
    def make(original: Any) -> Any:
        def update(self: Updates) -> Any:
            before = self.engine.model.get_parameter(FIRST_NORM).detach().clone()
            outcome = original(self)
            if self.engine.steps_done == 3 and dist.get_rank() == 1:
                with torch.no_grad():
                    self.engine.model.get_parameter(FIRST_NORM).copy_(before)
            return outcome

        return update

    return replaced(Updates, "_update", make)


# --- sharding ---------------------------------------------------------------------------------------------------------


def weights_gathered_before_the_update() -> Any:
    """A prefetch that comes too early: the next forward uses what the update has not reached."""

    def make(original: Any) -> Any:
        def update(self: Updates) -> Any:
            for unit in self.engine.strategy._units:  # type: ignore[attr-defined]
                unit.unshard()
            return original(self)

        return update

    return replaced(Updates, "_update", make)


def weights_stay_gathered_after_evaluation() -> Any:
    return replaced(Sharded, "drop_gathered", lambda _: lambda self: None)


@contextmanager
def zero3_runs_as_zero1() -> Iterator[None]:
    with patch.dict(STAGES, {3: STAGES[1]}):
        yield


def computes_in_float32() -> Any:
    return replaced(weft.engine.dp.sharded, "MixedPrecisionPolicy", lambda _: lambda **_: MixedPrecisionPolicy())


def weights_drawn_by_rank() -> Any:
    return replaced(
        weft.models.initial, "mixed_seed", lambda original: lambda seed, name: original(seed + dist.get_rank(), name)
    )


# --- data and randomness ----------------------------------------------------------------------------------------------


def one_rank_shifted_by_a_row() -> Any:
    return replaced(
        Loader, "batch", lambda original: lambda self, position: original(self, position + (self.dp_rank == 1))
    )


def order_seeded_by_rank() -> Any:
    def make(original: Any) -> Any:
        def rows(self: Loader, samples: Any) -> Any:
            seed, self.seed = self.seed, self.seed + self.dp_rank
            try:
                return original(self, samples)
            finally:
                self.seed = seed

        return rows

    return replaced(Loader, "_rows", make)


def fillers_carry_weight() -> Any:
    def make(original: Any) -> Any:
        def rows(self: Loader, samples: Any) -> Any:
            indices, filler = original(self, samples)
            return indices, filler & False

        return rows

    return replaced(Loader, "_rows", make)


def dropout_seeded_by_rank() -> Any:
    def make(original: Any) -> Any:
        return lambda *, seed, **rest: original(seed=seed + dist.get_rank(), **rest)

    return replaced(weft.engine.engine, "seeded_forward", make)


def dropout_the_same_in_every_row_block() -> Any:
    """Every rank draws the masks of the first rows."""

    def make(original: Any) -> Any:
        return lambda *, first_row, **rest: original(first_row=0, **rest)

    return replaced(weft.engine.engine, "seeded_forward", make)


def noise_in_the_forward() -> Any:
    """Of the size of a few roundings: no bound notices it."""

    def make(original: Any) -> Any:
        def logits(output: Any) -> torch.Tensor:
            exact = original(output)
            return exact + 1e-7 * torch.randn(exact.shape, generator=_NOISE)

        return logits

    return replaced(weft.engine.objective, "logits_of", make)


_NOISE = torch.Generator().manual_seed(0)


# --- a loss fused with its head, products in float8 -------------------------------------------------------------------


def capped_logits_without_their_slope() -> Any:
    """The gradient goes straight through the tanh."""

    def make(original: Any) -> Any:
        def piece(logits: torch.Tensor, labels: torch.Tensor, cap: Any, *, wants_gradient: bool) -> torch.Tensor:
            values = cap.of(logits.float())
            loss = original(logits, labels, cap, wants_gradient=False)
            if wants_gradient:
                whole = torch.softmax(values, dim=-1) - F.one_hot(labels.clamp(min=0), values.shape[-1])
                logits.copy_(whole * (labels != -100)[:, None])
            return loss

        return piece

    return replaced(weft.engine.kernels.cross_entropy, "_piece", make)


def fused_loss_of_labels_that_do_not_count() -> Any:
    def make(original: Any) -> Any:
        return lambda logits, labels, cap, **rest: original(logits, labels.clamp(min=0), cap, **rest)

    return replaced(weft.engine.kernels.head_loss, "cross_entropy_", make)


def gradients_on_the_scale_of_the_forward() -> Any:
    """A product of the backward takes its left operand's scale for both."""

    def make(original: Any) -> Any:
        def multiply(left: Any, right: Any, left_scale: Any, right_scale: Any, dtype: Any, *, is_fast: bool) -> Any:
            other = right_scale if is_fast else left_scale
            return original(left, right, left_scale, other, dtype, is_fast=is_fast)

        return multiply

    return replaced(weft.engine.kernels.float8, "_multiply", make)


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluation_averaged_over_ranks() -> Any:
    def make(original: Any) -> Any:
        def evaluate(self: Engine, batches: Any) -> Any:
            record = original(self, batches)
            return dataclasses.replace(record, loss=record.loss / self.topology.dp_degree)

        return evaluate

    return replaced(Engine, "evaluate", make)


def is_recomputing() -> bool:
    """A forward inside a backward."""
    return torch._C._current_graph_task_id() != -1


def masks_drawn_anew_when_recomputed() -> Any:
    def make(original: Any) -> Any:
        return lambda *args, **options: original(*args, preserve_rng_state=False, **options)

    return replaced(weft.engine.activations.recompute, "checkpoint", make)


def masks_of_the_first_rows_when_recomputed() -> Any:
    def make(original: Any) -> Any:
        def rows(self: Any, tensor: torch.Tensor) -> Any:
            with patch.object(self, "first_row", 0 if is_recomputing() else self.first_row):
                return original(self, tensor)

        return rows

    return replaced(_RowDropout, "_rows", make)


def weights_of_the_first_step_when_recomputed() -> Any:
    """A cast that was kept to save time, and is a step too old."""

    def make(original: Any) -> Any:
        def call(self: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
            masters = [owner._parameters[key] for owner, key in self.places]
            if not hasattr(self, "first"):
                self.first = [master.detach().clone() for master in masters]
            if not is_recomputing():
                return original(self, forward, *args, **kwargs)
            current = [master.data for master in masters]
            set_data(masters, self.first)
            try:
                return original(self, forward, *args, **kwargs)
            finally:
                set_data(masters, current)

        return call

    def set_data(masters: Any, values: Any) -> None:
        for master, value in zip(masters, values, strict=True):
            master.data = value

    return replaced(_CastUnit, "__call__", make)


def evaluation_in_train_mode() -> Any:
    return replaced(transformers.PreTrainedModel, "eval", lambda _: lambda self: self)


def eval_mode_left_on() -> Any:
    def make(original: Any) -> Any:
        def evaluate(self: Engine, batches: Any) -> Any:
            record = original(self, batches)
            self.model.eval()
            return record

        return evaluate

    return replaced(Engine, "evaluate", make)


# --- checkpoints, resume, export --------------------------------------------------------------------------------------


def after_load(change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]) -> Any:
    """change(state, state before it was loaded) after every load."""

    def make(original: Any) -> Any:
        def load(self: CheckpointStore, state: dict[str, torch.Tensor], **options: Any) -> Any:
            before = {key: value.clone() for key, value in state.items()}
            loaded = original(self, state, **options)
            with torch.no_grad():
                change(state, before)
            return loaded

        return load

    return replaced(CheckpointStore, "load", make)


def _swap(state: dict[str, torch.Tensor]) -> None:
    first, second = (local(state[f"optim.model.layers.0.mlp.{name}_proj.weight.exp_avg"]) for name in ("gate", "up"))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def shards_swapped_at_resume() -> Any:
    return after_load(lambda state, _: _swap(state) if dist.get_rank() == 1 else None)


def states_swapped_when_resharded() -> Any:
    """Only where the layout changed: the run is sharded, what is loaded into is not."""
    return after_load(
        lambda state, _: _swap(state) if not any(isinstance(v, DTensor) for v in state.values()) else None
    )


def step_count_reset_at_resume() -> Any:
    def change(state: dict[str, torch.Tensor], _: Any) -> None:
        for key, value in state.items():
            if key.startswith("optim.") and key.endswith(".step"):
                value.zero_()

    return after_load(change)


def one_tensor_not_loaded() -> Any:
    key = "model.model.layers.1.mlp.down_proj.weight"

    def change(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
        local(state[key]).copy_(local(before[key]))

    return after_load(change)


def data_counter_off_by_one() -> Any:
    def resume(original: Any) -> Any:
        def wrapped(job: Any, *rest: Any, **named: Any) -> Any:
            found = original(job, *rest, **named)
            return dataclasses.replace(found, samples=found.samples + int(job.resume))

        return wrapped

    return replaced(weft.train.worker, "resume_run", resume)


@contextmanager
def rate_one_step_late_after_resume() -> Iterator[None]:
    late = [0]

    def resume(original: Any) -> Any:
        def wrapped(job: Any, *rest: Any, **named: Any) -> Any:
            late[0] = int(job.resume)
            return original(job, *rest, **named)

        return wrapped

    def rate(original: Any) -> Any:
        return lambda train, step: original(train, step - late[0])

    with replaced(weft.train.worker, "resume_run", resume), replaced(weft.train.loop, "learning_rate_at", rate):
        yield


def weights_saved_before_the_step() -> Any:
    def stash(original: Any) -> Any:
        def train_step(self: TrainingLoop) -> Any:
            self.stale = {key: value.clone() for key, value in self.engine.state().items()}  # type: ignore[attr-defined]
            return original(self)

        return train_step

    def save(original: Any) -> Any:
        def wrapped(self: TrainingLoop, **options: Any) -> None:
            with patch.object(self.engine, "state", lambda: self.stale):  # type: ignore[attr-defined]
                original(self, **options)

        return wrapped

    return both(replaced(TrainingLoop, "_train_step", stash), replaced(TrainingLoop, "_save", save))


def loop_repeats_the_first_batch() -> Any:
    def make(original: Any) -> Any:
        def train_step(self: TrainingLoop) -> Any:
            self.samples = 0
            return original(self)

        return train_step

    return replaced(TrainingLoop, "_train_step", make)


def export_rounds_to_bfloat16() -> Any:
    def make(original: Any) -> Any:
        return lambda *args, dtype, **rest: original(*args, dtype=torch.bfloat16, **rest)

    return replaced(weft.train.export, "export_folder", make)


def export_drops_a_weight() -> Any:
    def make(original: Any) -> Any:
        def tensors(*args: Any, **keys: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in original(*args, **keys):
                yield name, torch.zeros_like(tensor) if name == NORM else tensor

        return tensors

    return replaced(weft.train.trained_tensors, "model_tensors", make)


@contextmanager
def both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield
