"""A unit's samples: every sample once an epoch, the same step whatever the number of shares."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.errors import DataError
from weft.server.clicks.task import count_held_out
from weft.server.units import SampleOrder


def _order(shares: int) -> SampleOrder:
    return SampleOrder(num_train=50, global_batch=10, shares=shares, seed=3)


def test_an_epoch_takes_every_sample_once_and_the_next_in_another_order() -> None:
    epochs = [np.concatenate([_order(3).indices(unit) for unit in range(15 * e, 15 * e + 15)]) for e in (0, 1)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(50))
    assert not np.array_equal(*epochs)


def test_a_steps_samples_do_not_depend_on_the_shares() -> None:
    for step in (0, 4, 7):
        one = _order(1).indices(step)
        four = np.concatenate([_order(4).indices(step * 4 + share) for share in range(4)])
        np.testing.assert_array_equal(one, four)


def test_more_shares_than_samples_leaves_some_empty() -> None:
    sizes = [len(SampleOrder(num_train=9, global_batch=2, shares=4, seed=0).indices(unit)) for unit in range(4)]
    assert sum(sizes) == 2


def test_the_held_out_part() -> None:
    assert count_held_out(100, eval_fraction=0.1) == 10
    assert count_held_out(2, eval_fraction=0.9) == 1
    with pytest.raises(DataError):
        count_held_out(1, eval_fraction=0.5)
