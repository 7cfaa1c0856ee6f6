"""A backward reads the values of its forward, however many updates lie between; nothing is copied that nobody reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.engine.pp.weight_stash import WeightStash


def made() -> tuple[nn.Module, WeightStash]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight  # a tie: two places, one master
    nn.init.ones_(model[0].weight)
    return model, WeightStash(model, dict(model.named_parameters()))


def test_a_backward_has_the_values_of_its_forward() -> None:
    model, versions = made()
    x = torch.ones(1, 2, requires_grad=True)
    with versions.reading(0):
        y = model(x).sum()
    with versions.updating(lowest=0):
        versions.masters[0].data.mul_(10)
    with versions.reading(0):
        y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[4.0, 4.0]]  # (1 1; 1 1) twice, not (10 ...)
    (gradient,) = versions.take_gradients(0)
    assert gradient is not None
    assert gradient.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert versions.take_gradients(0) == [None]
    assert (versions.newest, versions.most) == (1, 2)


def test_outside_the_model_has_its_masters_and_the_newest_values() -> None:
    model, versions = made()
    with versions.reading(0):
        assert model[0].weight is model[1].weight is not versions.masters[0]
    with versions.updating(lowest=0):
        versions.masters[0].data.mul_(10)
    assert model[0].weight is model[1].weight is versions.masters[0]
    assert model[0].weight[0, 0] == 10
    with versions.reading(1):
        assert model[0].weight[0, 0] == 10


def test_values_that_nobody_reads_again_are_updated_in_place() -> None:
    model, versions = made()
    before = versions.masters[0].data_ptr()
    with versions.reading(0):
        model(torch.ones(1, 2)).sum().backward()
    with versions.updating(lowest=1):
        versions.masters[0].data.mul_(10)
    assert (versions.masters[0].data_ptr(), versions.most, versions.older) == (before, 1, [])
    with pytest.raises(RuntimeError, match="weight version 0 does not exist: 1 is the newest"), versions.reading(0):
        pass


def test_a_restart_begins_with_the_newest() -> None:
    model, versions = made()
    with versions.reading(0):
        pass
    with versions.updating(lowest=0):
        versions.masters[0].data.mul_(10)
    versions.restart()
    with versions.reading(0):
        assert model[0].weight[0, 0] == 10
    assert versions.older == []
