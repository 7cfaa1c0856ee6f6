"""Adafactor's numbers are torch's; rows and columns are counted once, whatever the layout (ranks: test_muon.py)."""

from __future__ import annotations

import torch
from tiny import build_engine, global_batch
from torch import nn

from weft.engine.optim.adafactor import FACTORS
from weft.engine.optim.optimizers import OptimizerPolicy, create_state

ADAFACTOR = OptimizerPolicy(kind="adafactor", learning_rate=1e-2)


def test_every_parameter_has_the_numbers_of_torchs() -> None:
    """Matrices, vectors and stacked experts, weight decay included."""
    engine = build_engine("mixtral", optimizer=ADAFACTOR, clip_norm=0.0)
    own = dict(engine.model.named_parameters())
    others = {name: nn.Parameter(value.detach().clone()) for name, value in own.items()}
    groups = [{"params": [value], "weight_decay": 0.1 if value.ndim >= 2 else 0.0} for value in others.values()]
    right = torch.optim.Adafactor(groups, lr=1e-2, foreach=False)

    def keep(gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            others[name].grad = gradient.clone()

    engine.on_gradients = keep
    for step in range(3):
        engine.step(global_batch(step), learning_rate=1e-2)
        right.step()
    for name, value in own.items():
        assert torch.allclose(value, others[name], rtol=1e-5, atol=1e-7), name
        for key, state in engine.optimizer.state[value].items():
            assert torch.allclose(state, right.state[others[name]][key], rtol=1e-5, atol=1e-12), (name, key)


def test_states_are_rows_and_columns() -> None:
    engine = build_engine("llama", optimizer=ADAFACTOR)
    create_state(engine.optimizer, engine.parameters)
    state = engine.state()
    name, rows, columns = "model.layers.0.mlp.down_proj.weight", 32, 48
    assert [tuple(state[f"optim.{name}.{key}"].shape) for key in FACTORS] == [(rows, 1), (1, columns)]
    elements = sum(value.numel() for key, value in state.items() if key.startswith("optim."))
    assert elements < sum(value.numel() for value in engine.parameters) / 5
