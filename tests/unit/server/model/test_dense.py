"""Dense parameters as blocks: there and back, gradients in their places, models that servers cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from weft.core.errors import ModelError
from weft.core.table_spec import DENSE_BLOCK
from weft.server.model.dense import DenseBlocks


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))


def test_rows_load_into_another_model_and_padding_is_zero() -> None:
    first, second = _model(), _model()
    rows = DenseBlocks(first).rows()
    assert rows.shape == (2, DENSE_BLOCK)
    assert not rows.reshape(-1)[40 * 30 + 30 + 62 :].any()
    DenseBlocks(second).load(rows)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradients_lie_where_their_parameters_lie() -> None:
    model = _model()
    model[2].bias.requires_grad_(False)
    blocks = DenseBlocks(model)
    model(torch.randn(5, 40)).square().sum().backward()
    wanted = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.requires_grad])
    np.testing.assert_array_equal(blocks.gradients().reshape(-1)[: wanted.numel()], wanted.numpy())
    blocks.clear_gradients()
    assert not blocks.gradients().any()


def test_a_model_without_dense_parameters_has_no_blocks() -> None:
    assert len(DenseBlocks(nn.ReLU()).keys) == 0


def test_what_servers_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="float64"):
        DenseBlocks(nn.Linear(2, 2, dtype=torch.float64))
    with pytest.raises(ModelError, match="running statistics"):
        DenseBlocks(nn.Sequential(nn.BatchNorm1d(2)))
