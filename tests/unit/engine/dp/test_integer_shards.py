"""Shards of integers: the patch is where `fully_shard` looks, and leaves all other shards alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

import weft.engine.dp.integer_shards as integer_shards

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fsdp_param, "nn", nn)
    monkeypatch.setattr(_fsdp_param.FSDPParam, "init_dtype_attrs", integer_shards._torch_dtypes)
    integer_shards.patch_integer_shards()


def test_a_shard_of_integers_is_created_frozen_and_one_of_floats_trains() -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(torch.zeros(2, dtype=torch.uint8))
    assert not _fsdp_param.nn.Parameter(torch.zeros(2, dtype=torch.uint8)).requires_grad
    assert _fsdp_param.nn.Parameter(torch.zeros(2)).requires_grad
    assert not _fsdp_param.nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad
    assert _fsdp_param.nn.Module is nn.Module


@pytest.mark.parametrize(("dtype", "cast_to"), [(torch.uint8, None), (torch.float32, torch.bfloat16)])
def test_integers_are_not_cast(
    dtype: torch.dtype, cast_to: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_torch_2_11(self: SimpleNamespace, policy: MixedPrecisionPolicy) -> None:
        self.orig_dtype, self.param_dtype = self.sharded_param.dtype, policy.param_dtype

    monkeypatch.setattr(integer_shards, "_torch_dtypes", as_torch_2_11)
    shard = SimpleNamespace(sharded_param=torch.zeros(2, dtype=dtype))
    _fsdp_param.FSDPParam.init_dtype_attrs(shard, POLICY)  # type: ignore[arg-type]
    assert shard.param_dtype == cast_to


def test_fully_shard_looks_where_the_patch_is() -> None:
    """torch moves these names some day; then codes fail on the versions that need the patch."""
    creating = _fsdp_param.FSDPParam._init_sharded_param.__wrapped__.__code__.co_names  # type: ignore[attr-defined]
    assert {"nn", "Parameter"} <= set(creating)
    assert "init_dtype_attrs" in _fsdp_param_group.FSDPParamGroup._init_mp_dtypes.__code__.co_names
