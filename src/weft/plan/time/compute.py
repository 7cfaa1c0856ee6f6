"""Seconds of compute per micro-batch and rank: matmuls, attention, pointwise operators, the loss.

matmul      flops / (peak x share reached at this size); forward once, backward twice
attention   causal: 2 matmuls of queries with half the keys; a fused kernel reaches ATTENTION_SHARE of the best
            matmul, its backward has 2.5 times the forward's FLOPs; of packed documents: plan/time/documents.py
float8      linears of the blocks at the float8 rate, plus passes that quantise (plan/time/float8.py)
pointwise   bytes moved / memory bandwidth. Measured on an H200: eager HF blocks move 12 times their saved
            activations, compiled ones 2.5 times, forward and backward together
launch      lower bound of a block's forward by kernel launches on the host, which limits small models.
            Measured on an H200 with HF models, eager: 1.5 to 2.5 ms per block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.cluster import Device
from weft.core.model_shape import BlockShape, LinearShape
from weft.plan.columns import FLOAT8, Bools, Columns, Floats
from weft.plan.cp.sizes import most_work, work_of_parts
from weft.plan.memory.block_activations import bytes_of, saved_by_default, saved_by_selective
from weft.plan.memory.fused_loss import is_sharded
from weft.plan.memory.sequence_chunks import is_chunked
from weft.plan.request import Request, byte_sizes, rate_format
from weft.plan.time.documents import attention_flops_per_token, computed_flops_per_token
from weft.plan.time.float8 import RATE, experts_in_float8, has_float8, multiplies_in_float8, quantise_bytes, rate_share
from weft.plan.view import View

ATTENTION_SHARE = 0.6
ATTENTION_BACKWARD = 2.5
MOVED_EAGER, MOVED_COMPILED = 12.0, 2.5
LAUNCH_EAGER_S, LAUNCH_COMPILED_S = 1.5e-3, 0.2e-3  # a block's forward
LOSS_PASSES = 7  # reads and writes of the float32 logits, forward and backward
SHARDED_LOSS_BYTES = 36  # per logit, fused loss of a sharded head: two passes of several kernels (counted)
FUSED_LOSS_PASSES = 3  # logits in their own dtype: read for the sum, read and written for the gradient


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds per micro-batch in the blocks and the head of a rank."""

    matmul_forward: Floats
    expert_forward: Floats  # of them, in experts
    frozen_forward: Floats  # of them, with the head's, by frozen weights, whose gradients are not computed
    attention_forward: Floats
    pointwise_forward: Floats
    quantise_forward: Floats  # around float8 matmuls
    quantise_backward: Floats
    recompute: Floats
    loss: Floats
    head_forward: Floats
    launch: Floats  # added to forward and backward

    @property
    def forward(self) -> Floats:
        matmuls = self.matmul_forward + self.quantise_forward + self.head_forward
        return matmuls + self.attention_forward + self.pointwise_forward

    @property
    def backward(self) -> Floats:
        matmuls = 2 * (self.matmul_forward + self.head_forward) - self.frozen_forward + self.quantise_backward
        return matmuls + ATTENTION_BACKWARD * self.attention_forward + 2 * self.pointwise_forward + self.recompute


def block_seconds(view: View) -> BlockSeconds:
    """Seconds of compute per micro-batch on the rank of `view`."""
    request, columns, stage, tokens = view.request, view.columns, view.stage, view.tokens
    device = request.cluster.device
    matmul, experts, frozen, attention, pointwise, quantise, quantise_backward, recompute = (
        np.zeros(len(columns)) for _ in range(8)
    )
    for index, block in enumerate(request.shape.kinds):
        count = stage.blocks[:, index]
        linears = _linears_s(request, columns, block, tokens)
        scores = attention_seconds(request, columns, block, tokens)
        moved, recomputed_share = _pointwise_s(request, columns, block, tokens)
        matmul, attention = matmul + count * linears.matmul, attention + count * scores
        experts, frozen = experts + count * linears.experts, frozen + count * linears.frozen
        pointwise, quantise = pointwise + count * moved, quantise + count * linears.quantise_forward
        quantise_backward = quantise_backward + count * linears.quantise_backward
        forward = linears.matmul + linears.quantise_forward + scores + moved
        recompute = recompute + stage.recomputed.full[:, index] * forward
        recompute = recompute + count * is_chunked(view) * _into_widths_s(request, columns, block, tokens)
        recompute = recompute + stage.recomputed.selective[:, index] * moved * recomputed_share
    vocab = request.shape.num_logits / columns.tp
    head = linear_s(device, request, rows=tokens, inner=request.shape.hidden_size, outer=vocab)
    frozen = frozen + head * stage.holds_head * (not request.shape.trains_ends)
    fused = np.where(is_sharded(view), SHARDED_LOSS_BYTES, FUSED_LOSS_PASSES * byte_sizes(request).activation)
    per_logit = np.where(columns.fused_loss > 0, fused, LOSS_PASSES * 4)
    loss = per_logit * tokens * vocab / _bandwidth(device)
    least = np.where(columns.compiled > 0, LAUNCH_COMPILED_S, LAUNCH_EAGER_S) * stage.blocks.sum(axis=1)
    launch = 3 * np.maximum(least - (matmul + attention + pointwise), 0.0)
    if request.is_cpu:
        launch = np.zeros(len(columns))
    return BlockSeconds(
        matmul_forward=matmul, expert_forward=experts, frozen_forward=frozen, attention_forward=attention,
        pointwise_forward=pointwise, quantise_forward=quantise, quantise_backward=quantise_backward,
        recompute=recompute,
        loss=loss * stage.holds_head, head_forward=head * stage.holds_head, launch=launch,
    )  # fmt: skip


def linear_s(
    device: Device,
    request: Request,
    *,
    rows: Floats,
    inner: Floats | int,
    outer: Floats | int,
    in_float8: bool = False,
) -> Floats:
    """Seconds of one matmul [rows, inner] x [inner, outer]; without a float8 rate, at the rate of the compute dtype."""
    flops = 2.0 * rows * inner * outer
    is_short = in_float8 and has_float8(device)
    name = RATE if is_short else _rate_name(request)
    curve = device.rates[name]
    rate = device.peak_flops[name] * curve.best * flops / (flops + curve.half_flops)
    # a matmul takes at least the time to read its operands
    compute = byte_sizes(request).compute
    operands = rows * inner + inner * np.asarray(outer, dtype=np.float64)
    moved = (1 if is_short else compute) * operands + compute * rows * outer
    return np.maximum(flops / np.maximum(rate, 1.0), moved / _bandwidth(device))


def model_flops(request: Request, *, sees_all_keys: bool = False) -> float:
    """FLOPs per step for MFU: 6 per weight that a token uses, 4 per frozen one, and matmuls of attention.

    `sees_all_keys` counts masked keys too, as most published figures do.
    """
    shape, workload = request.shape, request.workload
    per_token = (6.0 if shape.trains_ends else 4.0) * shape.num_logits * shape.hidden_size
    for block, count in zip(shape.kinds, shape.kind_counts, strict=True):
        frozen = sum(linear.flops_per_token for linear in block.linears if not linear.is_trained)
        factors = sum(extra.num_parameters for extra in block.extras if extra.is_factor)
        per_token += count * (3.0 * block.linear_flops_per_token - frozen + 6.0 * factors)
        if block.attention is not None:
            length = workload.sequence_length if sees_all_keys else workload.attended_length
            per_token += 3.0 * count * attention_flops_per_token(block, length, sees_all_keys=sees_all_keys)
    return per_token * workload.tokens


@dataclass(frozen=True)
class _LinearSeconds:
    """Seconds of forward matmuls, and of the passes that quantise operands of float8 matmuls."""

    matmul: Floats
    experts: Floats  # of them
    frozen: Floats  # of them, by frozen weights
    quantise_forward: Floats
    quantise_backward: Floats

    def __add__(self, other: _LinearSeconds) -> _LinearSeconds:
        return _LinearSeconds(
            self.matmul + other.matmul,
            self.experts + other.experts,
            self.frozen + other.frozen,
            self.quantise_forward + other.quantise_forward,
            self.quantise_backward + other.quantise_backward,
        )


def _linears_s(request: Request, columns: Columns, block: BlockShape, tokens: Floats) -> _LinearSeconds:
    nothing = np.zeros(len(columns))
    total = _LinearSeconds(nothing, nothing, nothing, nothing, nothing)
    for linear in block.linears:
        total = total + _linear_of_block_s(request, columns, linear, tokens)
    for extra in (extra for extra in block.extras if extra.is_factor):
        here = columns.tp if extra.style != "replicated" else np.ones(len(columns))
        held = np.asarray(extra.num_parameters / extra.row_size / here, dtype=np.float64)
        factor = linear_s(request.cluster.device, request, rows=tokens, inner=extra.row_size, outer=held)
        total = total + _LinearSeconds(factor, nothing, nothing, nothing, nothing)
    return total


def _into_widths_s(request: Request, columns: Columns, block: BlockShape, tokens: Floats) -> Floats:
    """Products that a chunk of an MLP repeats in the backward: all but the last."""
    into = [linear for linear in block.linears if linear.role == "mlp" and linear.in_features != block.mlp_width]
    seconds = (_linear_of_block_s(request, columns, linear, tokens).matmul for linear in into)
    return np.asarray(sum(seconds, start=np.zeros(len(columns))))


def _linear_of_block_s(request: Request, columns: Columns, linear: LinearShape, tokens: Floats) -> _LinearSeconds:
    device, nothing = request.cluster.device, np.zeros(len(columns))
    if linear.role == "expert":
        here = np.maximum(1.0, linear.copies / columns.ep)
        # experts serve tokens of all ranks that share them, so work per rank is that of its own tokens; a tensor group
        # with experts partitioned over it has its tokens once
        rows = tokens * linear.active / here * columns.expert_tp / columns.tp
        outer = linear.out_features / columns.expert_tp
        matmul = here * linear_s(device, request, rows=rows, inner=linear.in_features, outer=outer)
        taken = experts_in_float8(linear, columns)
        if not np.any(taken):
            return _LinearSeconds(matmul, matmul, matmul * (not linear.is_trained), nothing, nothing)
        short = linear_s(device, request, rows=rows, inner=linear.in_features, outer=outer, in_float8=True)
        matmul = np.where(taken, here * short / rate_share(device, columns), matmul)
        passes = quantise_bytes(columns, rows=rows, inner=np.asarray(float(linear.in_features)), outer=outer)
        share = here * taken / _bandwidth(device)
        frozen = matmul * (not linear.is_trained)
        return _LinearSeconds(matmul, matmul, frozen, share * passes.forward, share * passes.backward)
    divisor = columns.matrix_divisor if linear.style != "replicated" else np.ones(len(columns))
    inner = linear.in_features / np.where(linear.style == "row", divisor, 1)
    outer = linear.out_features / np.where(linear.style == "column", divisor, 1)
    matmul = linear_s(device, request, rows=tokens, inner=inner, outer=outer)
    taken = _takes_float8(columns, linear)
    if not np.any(taken):
        frozen = linear.copies * matmul * (not linear.is_trained)
        return _LinearSeconds(linear.copies * matmul, nothing, frozen, nothing, nothing)
    short = linear_s(device, request, rows=tokens, inner=inner, outer=outer, in_float8=True)
    short = short / rate_share(device, columns)
    passes = quantise_bytes(columns, rows=tokens, inner=inner, outer=outer)
    share = linear.copies * taken / _bandwidth(device)
    return _LinearSeconds(
        linear.copies * np.where(taken, short, matmul),
        nothing,
        nothing,
        share * passes.forward,
        share * passes.backward,
    )


def _takes_float8(columns: Columns, linear: LinearShape) -> Bools:
    """Plans in which this linear has a float8 matmul."""
    by_choice = np.asarray([multiplies_in_float8(linear, choice) for choice in FLOAT8])
    return np.asarray(by_choice[columns.float8_linears])


def attention_seconds(request: Request, columns: Columns, block: BlockShape, tokens: Floats) -> Floats:
    """Of a forward on the busiest rank."""
    if block.attention is None:
        return np.zeros(len(columns))
    device = request.cluster.device
    name = _rate_name(request)
    rate = device.peak_flops[name] * device.rates[name].best * ATTENTION_SHARE
    flops = tokens * computed_flops_per_token(request, columns, block) / columns.tp
    flops = flops * most_work(columns) * work_of_parts(columns, block.attention)
    if not request.writes_scores(block.attention):
        return np.asarray(flops / rate, dtype=np.float64)
    # with materialised scores masked keys are computed too, and the scores move through memory several times
    all_keys = attention_flops_per_token(block, request.workload.sequence_length, sees_all_keys=True)
    flops = tokens * all_keys / columns.tp
    heads = block.attention.calls * block.attention.num_heads / columns.tp
    scores = tokens * request.workload.sequence_length * heads
    return np.asarray(flops / rate + 5 * 4 * scores / _bandwidth(device), dtype=np.float64)


def _pointwise_s(request: Request, columns: Columns, block: BlockShape, tokens: Floats) -> tuple[Floats, Floats]:
    """(seconds of the forward's pointwise operators, share of them under selective recompute)."""
    c, shape = byte_sizes(request).activation, request.shape
    saved = saved_by_default(block, compute_bytes=c, writes_scores=False, hidden_size=shape.hidden_size)
    partly = saved_by_selective(block, compute_bytes=c, writes_scores=False, hidden_size=shape.hidden_size)
    keys = np.zeros(len(columns))
    total = bytes_of(saved, block, columns, tokens=tokens, keys=keys)
    selected = np.minimum(bytes_of(partly, block, columns, tokens=tokens, keys=keys), total)
    passes = np.where(columns.compiled > 0, MOVED_COMPILED, MOVED_EAGER) / 3
    return passes * total / _bandwidth(request.cluster.device), (total - selected) / np.maximum(total, 1.0)


def _bandwidth(device: Device) -> float:
    return device.memory_bytes_per_s * device.memory_share


def _rate_name(request: Request) -> str:
    """The dtype whose rate applies: that of the weights, or the nearest that the device supports."""
    rates = request.cluster.device.rates
    wanted = rate_format(request)
    fallbacks = {
        "tf32": ("tf32", "float32"),
        "bfloat16": ("bfloat16", "float16", "float32"),
        "float16": ("float16", "float32"),
    }
    for name in fallbacks.get(wanted, ("float32",)):
        if name in rates:
            return name
    return next(iter(rates))
