"""Row optimizers against torch.optim, and against formulas in numpy where torch has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.table.table import Table

NUM_ROWS, DIM, STEPS = 50, 13, 6


def build(**fields: Any) -> Table:
    optimizer = RowOptimizer(learning_rate=0.1, **fields)
    return Table(TableSpec(name="t", dim=DIM, optimizer=optimizer, init=RowInit(kind="normal", scale=1.0)))


def gradients_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(NUM_ROWS, DIM)).astype(np.float32)


def rows_of(table: Table, keys: np.ndarray) -> np.ndarray:
    out = np.empty((keys.size, DIM), dtype=np.float32)
    table.pull(keys, out)
    return out


KEYS = np.random.default_rng(9).integers(-(2**62), 2**62, NUM_ROWS)


@pytest.mark.parametrize(
    ("fields", "optimizer"),
    [
        ({"kind": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ({"kind": "adagrad"}, lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8)),
        (
            {"kind": "adagrad", "initial_accumulator": 0.3, "epsilon": 1e-3},
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.3),
        ),
        ({"kind": "adam"}, lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-8)),
        (
            {"kind": "adam", "betas": (0.5, 0.9), "epsilon": 1e-2},
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), eps=1e-2),
        ),
    ],
)
def test_rows_touched_in_every_step_equal_torch(fields: dict[str, Any], optimizer: Any) -> None:
    table = build(**fields)
    weights = torch.nn.Parameter(torch.from_numpy(rows_of(table, KEYS)))
    reference = optimizer([weights])
    for step in range(STEPS):
        weights.grad = torch.from_numpy(gradients_of(step) * np.float32(0.25))
        reference.step()
        table.push(KEYS, gradients_of(step), gradient_scale=0.25)
    np.testing.assert_allclose(rows_of(table, KEYS), weights.detach().numpy(), rtol=2e-6, atol=2e-6)


def test_adagrad_equals_torch_with_sparse_gradients() -> None:
    table = build(kind="adagrad")
    weights = torch.nn.Parameter(torch.from_numpy(rows_of(table, KEYS)))
    reference = torch.optim.Adagrad([weights], lr=0.1, eps=1e-8)
    for step in range(STEPS):
        touched = np.flatnonzero(np.random.default_rng(100 + step).random(NUM_ROWS) < 0.4)
        lines = gradients_of(step)[touched]
        weights.grad = torch.sparse_coo_tensor(
            torch.from_numpy(touched[None]), torch.from_numpy(lines), (NUM_ROWS, DIM), check_invariants=True
        )
        with torch.sparse.check_sparse_tensor_invariants():
            reference.step()
        table.push(KEYS[touched], lines)
    np.testing.assert_allclose(rows_of(table, KEYS), weights.detach().numpy(), rtol=2e-6, atol=2e-6)


def test_adam_counts_the_steps_of_each_row() -> None:
    """A row that joins later takes its first step with its own bias correction."""
    table, alone = build(kind="adam"), build(kind="adam")
    for step in range(STEPS):
        rows = slice(0, NUM_ROWS if step >= 3 else 10)
        table.push(KEYS[rows], gradients_of(step)[rows])
        if step >= 3:
            alone.push(KEYS, gradients_of(step))
    np.testing.assert_array_equal(rows_of(table, KEYS)[10:], rows_of(alone, KEYS)[10:])
    assert (rows_of(table, KEYS)[:10] != rows_of(alone, KEYS)[:10]).all()


def test_rowwise_adagrad_divides_by_the_row_s_mean_square() -> None:
    table = build(kind="rowwise_adagrad", initial_accumulator=0.2, epsilon=1e-3)
    w, s = rows_of(table, KEYS).astype(np.float64), np.full((NUM_ROWS, 1), 0.2)
    for step in range(STEPS):
        g = gradients_of(step).astype(np.float64) * 3
        s += (g * g).mean(axis=1, keepdims=True)
        w -= 0.1 * 0.5 * g / (np.sqrt(s) + 1e-3)
        table.push(KEYS, gradients_of(step), gradient_scale=3.0, lr_scale=0.5)
    np.testing.assert_allclose(rows_of(table, KEYS), w, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.4, 0.0), (0.4, 0.7)])
def test_ftrl_is_mcmahan_s(l1: float, l2: float) -> None:
    beta, alpha = 1.5, 0.1
    table = build(kind="ftrl", beta=beta, l1=l1, l2=l2, initial_accumulator=0.05)
    w = rows_of(table, KEYS).astype(np.float64)
    n = np.full_like(w, 0.05)
    z = -np.sign(w) * (np.abs(w) * ((beta + np.sqrt(n)) / alpha + l2) + l1)  # gives w: a first value is not forgotten
    for step in range(STEPS):
        g = gradients_of(step).astype(np.float64)
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        w = np.where(np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
        table.push(KEYS, gradients_of(step))
    ours = rows_of(table, KEYS)
    np.testing.assert_allclose(ours, w, rtol=2e-4, atol=2e-6)
    assert (ours == 0).sum() == (w == 0).sum()
    assert ((ours == 0).sum() > 0) == (l1 > 0)


def test_ftrl_goes_on_from_values_set_from_outside() -> None:
    """With z left as it was, the next push would forget what was assigned or added."""
    table = build(kind="ftrl", l1=0.01, l2=0.1)
    table.push(KEYS, gradients_of(0))
    table.assign(KEYS, np.full((NUM_ROWS, DIM), 2.0, dtype=np.float32), only_absent=False)
    table.add(KEYS, np.full((NUM_ROWS, DIM), 1.0, dtype=np.float32))
    table.push(KEYS, np.zeros((NUM_ROWS, DIM), dtype=np.float32))
    np.testing.assert_allclose(rows_of(table, KEYS), 3.0, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"])
def test_equal_keys_of_a_push_are_applied_one_after_another(kind: str) -> None:
    together, apart = build(kind=kind), build(kind=kind)
    keys = np.array([5, 5, 8, 5], dtype=np.int64)
    together.push(keys, gradients_of(0)[:4])
    for i in range(4):
        apart.push(keys[i : i + 1], gradients_of(0)[i : i + 1])
    assert together.records(0, 9).tobytes() == apart.records(0, 9).tobytes()
    assert together.records(0, 9)["count"].tolist() == [3, 1]
