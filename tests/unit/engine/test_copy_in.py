"""The copy of gradients for a reduce-scatter: put where `fully_shard` looks for it, and torch's own on a CPU."""

from __future__ import annotations

import inspect

import torch
from tiny import build_engine
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from weft.engine.dp import copy_in


def test_sharding_puts_it_in_place_of_torch_s() -> None:
    build_engine("llama", {"data_parallel": {"zero": 3}})
    assert collectives.foreach_reduce_scatter_copy_in is copy_in.copy_in
    assert "foreach_reduce_scatter_copy_in(" in inspect.getsource(collectives.foreach_reduce), "torch calls it so"


def test_on_a_cpu_it_is_torch_s() -> None:
    gradients = [torch.randn(6, 2), torch.randn(4)]
    buffer = torch.empty(16)
    copy_in.copy_in(gradients, buffer, 2)
    expected = torch.stack(
        [torch.cat([part[rank].flatten() for part in (g.chunk(2) for g in gradients)]) for rank in (0, 1)]
    )
    assert torch.equal(buffer.view(2, -1), expected)
