"""Weights that travel in float8: which do. That they arrive is shown over ranks (tests/multiproc/engine)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.engine.dp.float8_gather import _NoValues, _reads_weights, gather_in_float8, quantise_shard
from weft.engine.kernels.float8 import E4M3, Float8Linear, quantise


class Reads(nn.Module):
    """Calls one layer, and reads the weight of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.taken = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.called(rows) @ self.taken.weight
        return out


def test_a_weight_that_the_models_code_reads_is_left_out() -> None:
    is_read = _reads_weights(nn.Sequential(Reads()))
    assert [is_read("0.called"), is_read("0.taken")] == [False, True]


def test_without_its_source_no_weight_is_known_to_be_left_alone() -> None:
    made: dict[str, type[nn.Module]] = {}
    exec("class Hidden(Base): pass", {"Base": nn.Module, "__name__": "not_there"}, made)
    assert _reads_weights(made["Hidden"]())("any")


def test_nothing_travels_where_nothing_is_sharded() -> None:
    from weft.core.plan import Plan

    layer = nn.Linear(32, 32)
    layer.__class__ = Float8Linear
    policy = Plan.from_tables({"precision": {"preset": "bf16"}}).precision.policy()
    assert gather_in_float8(nn.Sequential(layer), policy) is None


def test_a_shard_becomes_what_the_whole_would() -> None:
    weight = torch.randn(64, 48)
    whole, back = quantise(weight.bfloat16(), E4M3)
    scale = 448 / weight.bfloat16().abs().max().float()
    shards = [quantise_shard(shard, scale, torch.bfloat16) for shard in weight.chunk(4)]
    assert torch.equal(torch.cat([shard.view(torch.uint8) for shard in shards]), whole.view(torch.uint8))
    assert back == scale.reciprocal()


def test_who_reads_what_has_no_values_reads_no_number() -> None:
    nothing = _NoValues(torch.bfloat16, torch.device("cpu"))
    seen = torch.as_strided(nothing, (4, 3), (3, 1), storage_offset=0)  # type: ignore[arg-type]
    assert seen.shape == (4, 3)
    assert seen.dtype == torch.bfloat16
    assert seen.isnan().all()
    assert seen.untyped_storage().nbytes() == 2
    with pytest.raises(NotImplementedError):
        torch.relu(nothing)  # type: ignore[arg-type]


def test_a_layer_multiplies_by_what_was_gathered() -> None:
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    layer.__class__ = Float8Linear
    rows = torch.randn(16, 32).bfloat16()
    results = []
    for is_gathered in (False, True):
        if is_gathered:
            gathered = quantise(layer.weight.detach(), E4M3)
            hollow = _NoValues(torch.bfloat16, torch.device("cpu"))
            layer.weight = nn.Parameter(torch.as_strided(hollow, (48, 32), (32, 1)))  # type: ignore[arg-type]
            layer.gathered, layer.gathered_scale = gathered  # type: ignore[assignment]
        given = rows.clone().requires_grad_()
        layer(given).square().sum().backward()
        results.append((layer(rows).detach(), given.grad, layer.weight.grad))
        layer.weight.grad = None
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)
        assert found.is_contiguous()
