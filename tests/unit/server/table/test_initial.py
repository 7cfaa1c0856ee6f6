"""First values: the same whoever asks, and of the distribution that was asked for."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from weft.core.table_spec import RowInit, TableSpec
from weft.server.table.table import Table


def initial(
    keys: np.ndarray, kind: Literal["uniform", "normal", "zeros"], *, dim: int = 7, seed: int = 3
) -> np.ndarray:
    table = Table(TableSpec(name="t", dim=dim, init=RowInit(kind=kind, scale=0.5, seed=seed)))
    out = np.full((keys.size, dim), np.nan, dtype=np.float32)
    table.pull(keys, out)
    assert table.num_rows == 0
    return out


@pytest.mark.parametrize("kind", ["uniform", "normal", "zeros"])
def test_a_pull_and_a_push_give_the_same_first_values(kind: Literal["uniform", "normal", "zeros"]) -> None:
    keys = np.arange(-50, 50)
    table = Table(TableSpec(name="t", dim=7, init=RowInit(kind=kind, scale=0.5, seed=3)))
    table.add(keys[::-1].copy(), np.zeros((100, 7), dtype=np.float32))
    out = np.empty((100, 7), dtype=np.float32)
    table.pull(keys, out)
    np.testing.assert_array_equal(out, initial(keys, kind))


def test_seed_key_and_column_matter_and_the_width_does_not() -> None:
    keys = np.arange(1000)
    first = initial(keys, "uniform")
    assert np.unique(first).size > 6900
    assert (first != initial(keys, "uniform", seed=4)).mean() > 0.99
    np.testing.assert_array_equal(first[:, :4], initial(keys, "uniform", dim=4))


@pytest.mark.parametrize(("kind", "deviation"), [("uniform", 0.5 / 3**0.5), ("normal", 0.5)])
def test_moments(kind: Literal["uniform", "normal"], deviation: float) -> None:
    values = initial(np.arange(20_000), kind, dim=8)
    assert abs(values.mean()) < 4 * deviation / 400
    assert values.std() == pytest.approx(deviation, rel=0.01)
    assert np.abs(np.corrcoef(values, rowvar=False) - np.eye(8)).max() < 0.04
    if kind == "uniform":
        assert np.abs(values).max() <= 0.5
    else:
        assert (np.abs(values) > deviation).mean() == pytest.approx(0.3173, abs=0.01)


def test_zeros() -> None:
    assert not initial(np.arange(10), "zeros").any()
