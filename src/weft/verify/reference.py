"""The reference: one process, full tensors, a plain PyTorch loop. No engine step, no sharding, no wrappers.

For each step: summed token loss over the token count, backward, 2-norm of all gradients, clip, torch's own optimizer.
`compute` is the dtype of forward and backward; masters, gradients and optimizer live in `master`. Rows are processed in
the plan's chunks: in low precision a matmul over other rows rounds differently. The reference takes five definitions
from the engine: dropout masks by (seed, step, global row); the parameters that muon takes for matrices of blocks; the
moments that an 8-bit optimizer rounds; the random bits of stochastic rounding by (seed, name, step, element); and that
in low precision a block gets its inputs (rotary angles included) in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from weft.engine.activations.dropout import number_blocks, seeded_forward, uses_randomness
from weft.engine.kernels.cpu_matmul import patch_low_precision_matmul
from weft.models.layout import describe
from weft.verify.eight_bit import round_moments
from weft.verify.float8_delayed import PlainDelayed, delayed_of
from weft.verify.float8_reference import (
    NO_FALLBACK,
    Fallback,
    fallback_of,
    multiply_experts_in_float8,
    multiply_in_float8,
    round_inputs_of_experts,
)
from weft.verify.late_division import LateDivision
from weft.verify.low_update import round_low
from weft.verify.near_ties import Perturbation, evaluation_swing, perturbed
from weft.verify.plain_codes import rounded_like
from weft.verify.plain_experts import PlainExperts
from weft.verify.plain_objectives import REFERENCE, PlainLoss, logits_of, plain_loss, row_log_probs
from weft.verify.plain_optimizers import PlainAverage, evaluated, plain_optimizer, set_rate
from weft.verify.rank_sums import RankSums
from weft.verify.router_reference import RouterReference, compute_in_float32
from weft.verify.run_trace import (
    TRUTH,
    Aliases,
    Batch,
    BatchSplit,
    Exercise,
    ReferencePrecision,
    RunTrace,
    Tensors,
    has_experts,
)
from weft.verify.wide_residual import keep_residual_wide


def run_reference(
    build: Callable[[], nn.Module],
    exercise: Exercise,
    precision: ReferencePrecision,
    split: BatchSplit,
    *,
    perturbation: Perturbation | None = None,
) -> RunTrace:
    """Train on `exercise`; `build` returns a fresh model with allocated parameters on the compute device.
    With a `perturbation` forwards read weights that are moved at random (`near_ties`), and nothing is evaluated."""
    model, aliases = prepare(build(), precision, split)
    device = next(model.parameters()).device
    masters = {
        name: nn.Parameter(value.to(device, precision.master, copy=True), requires_grad=name not in exercise.frozen)
        for name, value in exercise.initial.items()
    }
    evaluation = [moved(batch, device) for batch in exercise.evaluation]
    trainable = {name: master for name, master in masters.items() if master.requires_grad}
    router = RouterReference(model, exercise.router)
    experts = PlainExperts(model, capacity_factor=exercise.router.capacity_factor)
    optimizer = plain_optimizer(trainable, exercise.train, is_fused=split.is_reordered, matrices=exercise.matrices)
    average = PlainAverage(trainable, exercise.train.ema_decay)
    trace, sums = RunTrace(initial=exercise.initial), RankSums(trainable, precision)
    objective, batches = plain_loss(exercise.objective, compute=precision.compute, device=device), exercise.batches
    if objective.has_reference:
        copy_weights(model, masters, aliases, gather=precision.gather)
        batches = [with_reference(model, moved(batch, device), split) for batch in batches]
        evaluation = [with_reference(model, batch, split) for batch in evaluation]
        trace.row_log_probs = [on_host(batch)[REFERENCE] for batch in batches]
    buffers = on_host(dict(model.named_buffers()))

    def evaluate_at(weights: Mapping[str, torch.Tensor]) -> float:
        copy_weights(model, weights, aliases, gather=precision.gather)
        return evaluate(model, evaluation, objective)

    for step, batch in enumerate(batches):
        set_rate(optimizer, exercise.rates[step])
        read = masters if perturbation is None else perturbed(masters, exercise.initial, perturbation)
        copy_weights(model, read, aliases, gather=precision.gather)
        experts.sequence_length = batch["labels"].shape[1]
        loss, exact = _backward(
            model, trainable, moved(batch, device), exercise, precision, split, aliases,
            sums=sums, step=step, router=router, objective=objective,
        )  # fmt: skip
        if step == 0:
            trace.first_gradients = on_host(exact or gradients_of(trainable))
        norm = clip_gradients(list(trainable.values()), exercise.clip_norm)
        if step not in exercise.skipped:
            optimizer.step()
            if precision.has_8bit_moments:
                round_moments(optimizer, trainable.values())
            if precision.rounds_moments or precision.rounds_weights:
                round_low(
                    optimizer, trainable, seed=exercise.train.seed,
                    moments=precision.rounds_moments, weights=precision.rounds_weights,
                )  # fmt: skip
            average.update()
        optimizer.zero_grad()
        trace.bias_loads.append(router.finish_step(masters, is_skipped=step in exercise.skipped))
        choices, drops = experts.take()
        trace.choices.append(choices)
        trace.drops.append(drops)
        trace.losses.append(loss)
        trace.norms.append(norm)
        if step == 0:
            trace.first_weights = on_host(masters)
        if perturbation is None and step in (0, len(exercise.batches) - 1):
            weights = evaluated(optimizer, masters)
            if precision == TRUTH and has_experts(exercise):
                trace.eval_swings.append(evaluation_swing(evaluate_at, weights, exercise.initial))
            trace.eval_losses.append(evaluate_at(weights))
    trace.weights = on_host(masters)
    trace.optimizer = on_host({**states_of(optimizer, trainable), **average.states()})
    now = on_host(dict(model.named_buffers()))
    trace.biases = on_host(router.biases())
    trace.buffers = {
        name: value for name, value in now.items() if name not in trace.biases and not torch.equal(value, buffers[name])
    }
    return trace


def one_update(exercise: Exercise, gradients: Tensors) -> Tensors:
    """The weights after a first update by these gradients, in float64."""
    masters = {
        name: nn.Parameter(value.double(), requires_grad=name not in exercise.frozen)
        for name, value in exercise.initial.items()
    }
    trainable = {name: master for name, master in masters.items() if master.requires_grad}
    for name, gradient in gradients.items():
        trainable[name].grad = gradient.double()
    optimizer = plain_optimizer(trainable, exercise.train, is_fused=False, matrices=exercise.matrices)
    set_rate(optimizer, exercise.rates[0])
    clip_gradients(list(trainable.values()), exercise.clip_norm)
    optimizer.step()
    return on_host(masters)


def states_of(optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]) -> Tensors:
    return {
        f"{name}.{key}": value
        for name, master in trainable.items()
        for key, value in optimizer.state.get(master, {}).items()
        if isinstance(value, torch.Tensor)
    }


def clip_gradients(masters: Sequence[nn.Parameter], clip_norm: float) -> float:
    """Clip to `clip_norm` if it is positive; return the 2-norm before clipping."""
    gradients = [master.grad for master in masters if master.grad is not None]
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    if clip_norm > 0:
        for gradient in gradients:
            gradient.mul_(min(1.0, clip_norm / (norm + 1e-6)))
    return norm


def gradients_of(trainable: Mapping[str, nn.Parameter]) -> Tensors:
    """Without parameters that the loss does not depend on: torch's optimizers leave them as they are."""
    return {name: master.grad for name, master in trainable.items() if master.grad is not None}


def moved(batch: Batch, device: torch.device) -> Tensors:
    return {key: value.to(device) for key, value in batch.items()}


def on_host(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Copies that later steps do not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _backward(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    batch: Batch,
    exercise: Exercise,
    precision: ReferencePrecision,
    split: BatchSplit,
    aliases: Aliases,
    *,
    sums: RankSums,
    step: int,
    router: RouterReference,
    objective: PlainLoss,
) -> tuple[float, Tensors]:
    """Add the gradients of the mean loss to the masters; return the loss, and gradients before they were rounded on
    their way, if they were."""
    count = objective.count(batch["labels"])
    rows = batch["labels"].shape[0]
    if split.ranks > 1:  # each rank's rows of the first micro-batch, then of the second, …
        num_chunks = rows // split.chunk_rows
        order = torch.arange(rows).view(split.ranks, num_chunks, -1).transpose(0, 1).reshape(-1)
        batch = {key: value[order] for key, value in batch.items()}
    begins = range(0, rows, split.chunk_rows)
    total = 0.0
    sums.begin_step()
    for begin in reversed(begins) if split.is_reordered else begins:
        total += add_gradients(
            model, trainable, batch, range(begin, min(rows, begin + split.chunk_rows)), exercise, precision,
            aliases, step=step, count=count, router=router, objective=objective,
        )  # fmt: skip
        sums.finish_chunk()
    sums.finish()
    for gradient in gradients_of(trainable).values():
        gradient.div_(precision.loss_scale)
        if precision.rounds_gradients:
            gradient.copy_(gradient.bfloat16())
    return total / count, {name: exact / precision.loss_scale for name, exact in sums.exact.items()}


def add_gradients(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    batch: Batch,
    rows: range,
    exercise: Exercise,
    precision: ReferencePrecision,
    aliases: Aliases,
    *,
    step: int,
    count: int,
    objective: PlainLoss,
    router: RouterReference | None = None,
) -> float:
    """Add the gradients of (summed loss of `rows`) / `count` to the masters; return the summed loss."""
    chunk = {key: value[rows.start : rows.stop] for key, value in batch.items()}
    fallback_of(model).begin(step)
    delayed_of(model).begin(step)
    with seeded_forward(
        seed=exercise.train.seed,
        step=step,
        first_row=rows.start,
        num_rows=chunk["labels"].shape[0],
        is_random=uses_randomness(model),
    ):
        loss_sum = objective.loss_sum(model, chunk)
    late: LateDivision | None = getattr(model, "late_division", None)
    scale = precision.loss_scale / count
    if late is not None:
        late.scale, scale = scale, 1.0
    terms = router.terms(batch["input_ids"].numel()) if router is not None else 0.0
    (loss_sum * scale + terms * precision.loss_scale).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        master = trainable.get(aliases.get(name, name))
        if master is not None and parameter.grad is not None:
            gradient = parameter.grad.to(precision.master)
            master.grad = gradient if master.grad is None else master.grad + gradient
        parameter.grad = None
    return loss_sum.item()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], objective: PlainLoss) -> float:
    model.eval()
    fallback_of(model).finish()
    delayed_of(model).finish()
    count = objective.count(torch.cat([batch["labels"] for batch in batches])) if batches else 1
    total = sum(objective.loss_sum(model, batch).item() for batch in batches)
    model.train()
    return total / count


@torch.no_grad()
def with_reference(model: nn.Module, batch: Batch, split: BatchSplit) -> Tensors:
    """The batch with the log-probabilities of its rows by the weights that the model has, in the chunks of training."""
    model.eval()
    rows, size = batch["labels"].shape[0], split.chunk_rows
    parts = [{key: value[at : at + size] for key, value in batch.items()} for at in range(0, rows, size)]
    found = torch.cat([row_log_probs(logits_of(model, part), part["labels"]) for part in parts])
    model.train()
    return {**batch, REFERENCE: found}


def prepare(model: nn.Module, precision: ReferencePrecision, split: BatchSplit) -> tuple[nn.Module, Aliases]:
    """The model in its compute precision, and the aliases of untied parameters."""
    layout = describe(model)
    model = _cast(model, precision)
    number_blocks(model, layout)
    has_fallback = precision.fallback_error > 0
    fallback = Fallback(precision.measure_every, precision.fallback_error) if has_fallback else NO_FALLBACK
    model.float8_fallback = fallback  # type: ignore[assignment]
    model.float8_delayed = PlainDelayed(precision.amax_history, precision.amax_margin)  # type: ignore[assignment]
    multiply_in_float8(model, precision.float8, precision.recipe, fallback)
    if precision.has_float8_experts:
        multiply_experts_in_float8(model, precision.recipe, fallback)
    if precision.has_float8_wire:
        round_inputs_of_experts(model)
    if precision.divides_last:
        model.late_division = LateDivision(model)  # type: ignore[assignment]
    if not (split.unties and precision.is_low):
        return model, {}
    for alias in layout.ties:
        owner, _, key = alias.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, key, nn.Parameter(getattr(module, key).detach().clone()))
    return model, layout.ties


def _cast(model: nn.Module, precision: ReferencePrecision) -> nn.Module:
    """Parameters in the compute dtype. Buffers (rotary frequencies) keep their own unless all is float64."""
    if precision.compute == torch.float64:
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped kernels lack float64
        return model.double()
    if precision.compute == precision.master:
        return model
    patch_low_precision_matmul(precision.compute)  # as engines do, or a CPU would use two different matmul kernels
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute)

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(precision.compute) if value.is_floating_point() else value

    if precision.has_wide_residual:
        keep_residual_wide(model, precision.compute)
    for name in () if precision.has_wide_residual else describe(model).blocks:
        model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
    if precision.has_wide_router:
        compute_in_float32(model)
    if precision.has_wide_logits:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        head.forward = lambda hidden: F.linear(
            hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()
        )
    return model


@torch.no_grad()
def copy_weights(
    model: nn.Module, masters: Mapping[str, torch.Tensor], aliases: Aliases, *, gather: str | None = None
) -> None:
    """Masters as forwards read them; `gather`: the format in which they travel."""
    for name, parameter in model.named_parameters():
        parameter.copy_(masters[aliases.get(name, name)])
        if gather is not None:
            parameter.copy_(rounded_like(parameter, gather))
