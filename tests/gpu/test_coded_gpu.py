"""Codes on a GPU: the bits of a CPU, and a step of a sharded model over loopback whose numbers travel as codes."""

from __future__ import annotations

import pytest
import torch
from tiny import build_engine, global_batch

from weft.comm.codes import decode, encode
from weft.comm.loopback import loopback_world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [256, 1000, 2**20 + 3])
@pytest.mark.parametrize("name", ["bfloat16", "int8", "float8_e4m3"])
def test_codes_have_the_bits_of_a_cpu(name: str, count: int) -> None:
    values = torch.randn(4, count, generator=torch.Generator().manual_seed(count)) * torch.logspace(-9, 0, count)
    on_cpu, on_gpu = encode(values, name), encode(values.cuda(), name)
    assert torch.equal(on_gpu.cpu().view(torch.uint8), on_cpu.view(torch.uint8))
    assert torch.equal(decode(on_gpu, (count,), name).cpu(), decode(on_cpu, (count,), name))


@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_replicate": 4}, {"dp_shard": 2, "dp_replicate": 2}])
def test_a_rank_steps_with_codes(mesh: dict[str, int]) -> None:
    """Numbers of a sum over replicas mean nothing here: each rank's share has a layout of its own, and a loopback gives
    the own one in the place of all."""
    precision = {"preset": "bf16", "reduce": "int8", "gather": "int8"}
    with loopback_world(num_ranks=4):
        device = torch.device("cuda", torch.cuda.current_device())
        engine = build_engine("llama", {"mesh": mesh, "precision": precision}, device=device)
        records = [engine.step(engine.share_of(global_batch(step))) for step in range(3)]
        assert all(torch.tensor(record.loss).isfinite() for record in records[:1])
        if "dp_replicate" not in mesh:
            assert all(torch.tensor([record.loss, record.grad_norm]).isfinite().all() for record in records)
        assert not [row for row in engine.dtypes() if not row.ok]
