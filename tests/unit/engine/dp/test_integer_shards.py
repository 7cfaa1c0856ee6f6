"""Shards of integers: the patch reaches where `fully_shard` creates them, and ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

from weft.engine.dp.integer_shards import frozen_integers


def test_a_shard_of_integers_is_created_frozen_and_one_of_floats_trains() -> None:
    with frozen_integers():
        assert not _fsdp_param.nn.Parameter(torch.zeros(2, dtype=torch.uint8)).requires_grad
        assert _fsdp_param.nn.Parameter(torch.zeros(2)).requires_grad
        assert not _fsdp_param.nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad
    assert _fsdp_param.nn is nn
    with pytest.raises(RuntimeError, match="floating point"):
        _fsdp_param.nn.Parameter(torch.zeros(2, dtype=torch.uint8))


def test_fully_shard_creates_its_shards_by_that_name() -> None:
    """torch moves it some day; then codes fail on the versions that need the patch."""
    assert "nn" in _fsdp_param.FSDPParam._init_sharded_param.__wrapped__.__code__.co_names
