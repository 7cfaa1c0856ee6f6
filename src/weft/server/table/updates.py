"""Update kernels: each changes the rows of one block of a push, in order. All arithmetic on rows is float32.

    sgd              w -= lr * g
    adagrad          s += g * g;          w -= lr * g / (sqrt(s) + epsilon)
    rowwise_adagrad  s += mean(g * g);    w -= lr / (sqrt(s) + epsilon) * g
    adam             m, v, t as Kingma and Ba; t counts the pushes of this row
    ftrl             z += g - (sqrt(n + g * g) - sqrt(n)) / lr * w;  n += g * g
                     w = 0 where |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)
    add              w += g

A slot of NONE is a key without a row: its gradient is dropped. Columns are written `start + c` with a start computed
before the loop: with more terms in the brackets the compiler does not vectorise (ftrl: 5 times slower).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from weft.server.arrays import Keys, Rows
from weft.server.table.compiled import compiled, compiled_sum
from weft.server.table.record import ADAGRAD, ADAM, ADD, FTRL, ROWWISE_ADAGRAD, SGD, VALUES

F32 = np.float32
ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@compiled
def _add(rows: Rows, slot: int, gradients: Rows, i: int, rate: np.float32) -> None:
    for c in range(gradients.shape[1]):
        rows[slot, VALUES + c] += rate * gradients[i, c]


@compiled
def _adagrad(
    rows: Rows, slot: int, gradients: Rows, i: int, lr: np.float32, scale: np.float32, epsilon: np.float32
) -> None:
    dim = gradients.shape[1]
    sums = VALUES + dim
    for c in range(dim):
        g = gradients[i, c] * scale
        total = rows[slot, sums + c] + g * g
        rows[slot, sums + c] = total
        rows[slot, VALUES + c] -= lr * (g / (np.sqrt(total) + epsilon))


@compiled_sum
def _sum_of_squares(gradients: Rows, i: int) -> np.float32:
    total = ZERO
    for c in range(gradients.shape[1]):
        total += gradients[i, c] * gradients[i, c]
    return total


@compiled
def _rowwise_adagrad(
    rows: Rows, slot: int, gradients: Rows, i: int, lr: np.float32, scale: np.float32, epsilon: np.float32
) -> None:
    dim = gradients.shape[1]
    total = rows[slot, VALUES + dim] + _sum_of_squares(gradients, i) * (scale * scale / F32(dim))
    rows[slot, VALUES + dim] = total
    _add(rows, slot, gradients, i, -scale * (lr / (np.sqrt(total) + epsilon)))


@compiled
def _adam(
    rows: Rows, slot: int, gradients: Rows, i: int, lr: np.float32, scale: np.float32, constants: NDArray[np.float64]
) -> None:
    dim = gradients.shape[1]
    m, v, t = VALUES + dim, VALUES + 2 * dim, VALUES + 3 * dim
    step = rows[slot, t] + ONE  # stops at 2 ** 24, where both corrections are 1
    rows[slot, t] = step
    beta1, beta2, epsilon = F32(constants[0]), F32(constants[1]), F32(constants[2])
    rest1, rest2 = F32(1.0 - constants[0]), F32(1.0 - constants[1])
    step_size = F32(np.float64(lr) / (1.0 - constants[0] ** np.float64(step)))
    root = F32(math.sqrt(1.0 - constants[1] ** np.float64(step)))
    for c in range(dim):
        g = gradients[i, c] * scale
        mean = beta1 * rows[slot, m + c] + rest1 * g
        square = beta2 * rows[slot, v + c] + rest2 * (g * g)
        rows[slot, m + c] = mean
        rows[slot, v + c] = square
        rows[slot, VALUES + c] -= step_size * (mean / (np.sqrt(square) / root + epsilon))


@compiled
def _ftrl(
    rows: Rows, slot: int, gradients: Rows, i: int, lr: np.float32, scale: np.float32, constants: NDArray[np.float64]
) -> None:
    dim = gradients.shape[1]
    z_start, n_start = VALUES + dim, VALUES + 2 * dim
    beta, l1, l2, inverse_lr = F32(constants[0]), F32(constants[1]), F32(constants[2]), ONE / lr
    first = F32(constants[3])
    for c in range(dim):
        g = gradients[i, c] * scale
        n = rows[slot, n_start + c]
        total = n + g * g
        root = np.sqrt(total)
        w = rows[slot, VALUES + c]
        z = rows[slot, z_start + c]
        if z == ZERO and n == first and w != ZERO:  # a first value would be forgotten: z begins where it gives w
            z = -math.copysign(abs(w) * ((beta + np.sqrt(n)) * inverse_lr + l2) + l1, w)
        z = z + g - (root - np.sqrt(n)) * inverse_lr * w
        rows[slot, z_start + c] = z
        rows[slot, n_start + c] = total
        beyond = z - min(max(z, -l1), l1)
        rows[slot, VALUES + c] = -beyond / ((beta + root) * inverse_lr + l2)


@compiled
def update_block(
    kernel: int,
    rows: Rows,
    slots: Keys,
    gradients: Rows,
    start: int,
    stop: int,
    lr: np.float32,
    scale: np.float32,
    constants: NDArray[np.float64],
) -> None:
    """Apply gradients[start:stop] to rows[slots[0:stop - start]]."""
    for i in range(start, stop):
        slot = slots[i - start]
        if slot < 0:
            continue
        if kernel == ADD:
            _add(rows, slot, gradients, i, scale)
        elif kernel == SGD:
            _add(rows, slot, gradients, i, -(lr * scale))
        elif kernel == ADAGRAD:
            _adagrad(rows, slot, gradients, i, lr, scale, F32(constants[0]))
        elif kernel == ROWWISE_ADAGRAD:
            _rowwise_adagrad(rows, slot, gradients, i, lr, scale, F32(constants[0]))
        elif kernel == ADAM:
            _adam(rows, slot, gradients, i, lr, scale, constants)
        elif kernel == FTRL:
            _ftrl(rows, slot, gradients, i, lr, scale, constants)


@compiled
def hold_values(rows: Rows, slots: Keys, dim: int, lr: float, constants: NDArray[np.float64]) -> None:
    """ftrl: make z agree with values that were set from outside, or the next push would forget them."""
    beta, l1, l2 = F32(constants[0]), F32(constants[1]), F32(constants[2])
    for slot in slots:
        for c in range(dim):
            w = rows[slot, VALUES + c]
            root = np.sqrt(rows[slot, VALUES + 2 * dim + c])
            pull = abs(w) * ((beta + root) / F32(lr) + l2) + l1
            rows[slot, VALUES + dim + c] = -math.copysign(pull, w) if w != ZERO else ZERO
