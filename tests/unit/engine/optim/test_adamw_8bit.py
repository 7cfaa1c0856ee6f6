"""8-bit AdamW: what it takes from torchao, how it cuts blocks, what it saves in memory."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny import CPU, global_batch
from torch import nn

from weft.core.plan import Plan
from weft.core.terms import MemoryTerm
from weft.engine.engine import Engine
from weft.engine.optim.adamw_8bit import block_size_for, build_adamw8bit, quantised_parts
from weft.engine.optim.optimizers import Kind, OptimizerPolicy
from weft.engine.state import state_tensors
from weft.train.ledger.ledger import memory_terms


def test_the_private_names_of_torchao_are_there() -> None:
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    names = ["p", "grad", "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "lr", "beta1", "beta2", "weight_decay"]
    found = [*inspect.signature(single_param_adam).parameters]
    assert found[:10] == names
    assert len(found) == 13
    state = OptimState8bit.zeros((4, 64), True, 64, "cpu", dtype=torch.float32)
    assert (state.codes.dtype, state.codes.shape) == (torch.uint8, (4, 64))
    assert (state.scale.dtype, state.scale.shape) == (torch.float32, (4,))
    parts = quantised_parts(state)
    assert parts is not None
    assert parts.scales.shape == (4, 1)
    assert parts.scales.data_ptr() == state.scale.data_ptr()  # loaded in place


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 256), 256),
        ((64, 384), 128),
        ((64, 192), 64),
        ((64, 96), None),  # no block divides a row
        ((63, 64), None),  # too small to gain
        ((64, 64), 64),
        ((4096,), None),  # vectors stay float32
        ((4, 32, 64), 64),  # stacked experts: ZeRO may shard the second dimension
    ],
)
def test_a_block_divides_the_last_dimension(shape: tuple[int, ...], expected: int | None) -> None:
    assert block_size_for(torch.Size(shape)) == expected


def test_cutting_rows_gives_the_same_numbers_bit_by_bit() -> None:
    """Two parts of 30 and 34 rows of one parameter, against one process with all 64."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 256, generator=generator)
    gradients = [torch.randn(64, 256, generator=generator) for _ in range(3)]

    def run(rows: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parameter = nn.Parameter(start[rows].clone())
        optimizer = build_adamw8bit([{"params": [parameter]}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for gradient in gradients:
            parameter.grad = gradient[rows].clone()
            optimizer.step()
        module = nn.ParameterDict({"w": parameter})
        return parameter.detach(), state_tensors(module, optimizer, {}, {})

    whole, whole_state = run(slice(None))
    pieces = [run(rows) for rows in (slice(0, 30), slice(30, 64))]
    assert not torch.equal(whole, start)
    assert torch.equal(torch.cat([values for values, _ in pieces]), whole)
    for key in ("optim.w.exp_avg.codes", "optim.w.exp_avg_sq.scales"):
        assert torch.equal(torch.cat([state[key] for _, state in pieces]), whole_state[key])


def test_the_state_is_about_a_quarter() -> None:
    def state_bytes(kind: Kind) -> int:
        model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
        engine = Engine(model, Plan(), optimizer=OptimizerPolicy(kind=kind), device=CPU)
        engine.step(global_batch(0))
        return memory_terms(engine)[MemoryTerm.OPTIMIZER_STATE]

    share = state_bytes("adamw8bit") / state_bytes("adamw")
    assert 1 / 4 < share < 1 / 3.5  # a code of 1 byte for 4, a scale of 4 bytes for 64, and the vectors


def test_a_closure_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = build_adamw8bit([{"params": [parameter]}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(TypeError, match="no closure"):
        optimizer.step(lambda: 0.0)
