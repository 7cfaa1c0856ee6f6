"""The copy of gradients for a reduce-scatter: put where `fully_shard` looks for it, and torch's own on a CPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tiny import build_engine
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from weft.engine.dp import reduce_scatter_copy as copy_in
from weft.engine.kernels.fast_path import fast_path


def test_sharding_puts_it_in_place_of_torch_s() -> None:
    build_engine("llama", {"data_parallel": {"zero": 3}})
    assert collectives.foreach_reduce_scatter_copy_in is copy_in.copy_in
    build_engine("llama", {"data_parallel": {"zero": 3}, "kernels": {"gradient_copy": "torch"}})
    assert collectives.foreach_reduce_scatter_copy_in is copy_in.torch_copy_in
    assert "foreach_reduce_scatter_copy_in(" in inspect.getsource(collectives.foreach_reduce), "torch calls it so"


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({}, "nothing is sharded"),
        ({"data_parallel": {"zero": 2}, "kernels": {"gradient_copy": "torch"}}, "kernels.gradient_copy is 'torch'"),
        ({"data_parallel": {"zero": 2}}, "it needs a GPU and Triton"),
    ],
)
def test_why_it_is_off_is_told(tables: dict[str, Any], why: str) -> None:
    (found,) = [row for row in fast_path(build_engine("llama", tables)) if row.technique == "own gradient copies"]
    assert (found.on, found.why) == (False, why)


def test_on_a_cpu_it_is_torch_s() -> None:
    gradients = [torch.randn(6, 2), torch.randn(4)]
    buffer = torch.empty(16)
    copy_in.copy_in(gradients, buffer, 2)
    expected = torch.stack(
        [torch.cat([part[rank].flatten() for part in (g.chunk(2) for g in gradients)]) for rank in (0, 1)]
    )
    assert torch.equal(buffer.view(2, -1), expected)
