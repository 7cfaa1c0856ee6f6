"""AdamW's update of bfloat16 tensors, computed in float32: one read and one write of each, no second buffer.

    g = factor * gradient;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    w <- (1 - lr decay) w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + epsilon)

The weight is updated from the moments before they are rounded. Then bfloat16 tensors are rounded: v and w
stochastically, since nearest drops every change below half a step of the dtype (a v of squared normal numbers ends 4%
too high at b2 = 0.99, 44% at 0.999); m to nearest, whose error is smaller by a third (0.38% against 0.54% of the norm
at b1 = 0.9) and whose bias is 2e-5 of the mean at 0.9 and 3e-4 at 0.99. float32 tensors are not rounded.

One operator (`torch.ops.weft.adamw_low_`) with two kernels: Triton on a GPU; plain torch elsewhere, a piece at a time.
A dry run calls neither: the fake kernel allocates no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.engine.kernels.triton_here import has_triton
from weft.engine.optim.rounding_bits import for_second_moment, for_weight, random_bits, round_with, words_of

PIECE_ELEMENTS = 2**18  # float32 elements at a time, without Triton


@dataclass(frozen=True)
class Constants:
    """The constants of an update, equal for every element."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float

    def step_size(self, step: int) -> float:
        return float(self.learning_rate / (1.0 - self.beta1**step))

    def root_correction(self, step: int) -> float:
        return float((1.0 - self.beta2**step) ** 0.5)


@torch.library.custom_op("weft::adamw_low_", mutates_args=("weights", "exp_avgs", "exp_avg_sqs"))
def adamw_low_(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    factor: Tensor | None,
    keys: list[int],
    firsts: list[int],
    row_steps: list[int],
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    """Tensors of [rows, columns]; `steps` are numbers on the host, `factor` (0-dim) is on the device."""
    constants = Constants(learning_rate, beta1, beta2, epsilon, decay)
    for weight, gradient, mean, square, step, key, first, row_step in zip(
        weights, gradients, exp_avgs, exp_avg_sqs, steps, keys, firsts, row_steps, strict=True
    ):
        number = int(step)
        update = _update_on_gpu if weight.is_cuda and has_triton() else _update_in_pieces
        tensors = (weight, gradient, mean, square)
        update(*tensors, factor, words_of(key, number), number, constants, first=first, row_step=row_step)


@adamw_low_.register_fake
def _(*_given: object) -> None:
    return None


def _update_on_gpu(*given: Any, **places: Any) -> None:
    from weft.engine.optim.adamw_low_triton import launch

    launch(*given, **places)


def _update_in_pieces(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor | None,
    words: tuple[int, int],
    step: int,
    constants: Constants,
    *,
    first: int,
    row_step: int,
) -> None:
    for at in _pieces(*weight.shape):
        bits = random_bits(words, _elements(*at, first, row_step, device=weight.device))
        _piece(weight[at], gradient[at], exp_avg[at], exp_avg_sq[at], factor, bits, step, constants)


def _piece(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor | None,
    bits: Tensor,
    step: int,
    constants: Constants,
) -> None:
    given = gradient.float() if factor is None else gradient.float() * factor
    # `.float()` of a float32 tensor is the tensor itself, which then changes in place
    mean = exp_avg.float().lerp_(given, 1.0 - constants.beta1)
    square = exp_avg_sq.float().mul_(constants.beta2).addcmul_(given, given, value=1.0 - constants.beta2)
    root = square.sqrt().div_(constants.root_correction(step)).add_(constants.epsilon)
    value = weight.float().mul_(1.0 - constants.learning_rate * constants.decay)
    value.addcdiv_(mean, root, value=-constants.step_size(step))
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(_stored(square, exp_avg_sq.dtype, for_second_moment(bits)))
    weight.copy_(_stored(value, weight.dtype, for_weight(bits)))


def _stored(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    return round_with(values, bits) if dtype == torch.bfloat16 else values


def _pieces(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    rows = max(1, PIECE_ELEMENTS // num_columns)
    for row in range(0, num_rows, rows):
        for column in range(0, num_columns, PIECE_ELEMENTS):
            yield (
                slice(row, min(row + rows, num_rows)),
                slice(column, min(column + PIECE_ELEMENTS, num_columns)),
            )


def _elements(rows: slice, columns: slice, first: int, row_step: int, *, device: torch.device) -> Tensor:
    """The indices of a piece's elements in the full tensor."""
    begins = torch.arange(rows.start, rows.stop, device=device)[:, None] * row_step
    return begins + torch.arange(columns.start, columns.stop, device=device) + first
