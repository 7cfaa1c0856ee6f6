"""Products in float8: which layers, how near they are, and that gradients are those of the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import build_engine, global_batch
from torch import nn

import weft.core.float8 as rule
import weft.engine.kernels.float8 as float8
from weft.core.errors import DeviceError, NotBuiltError
from weft.engine.kernels.fast_path import fast_path
from weft.engine.kernels.float8 import Float8Linear, quantise
from weft.engine.kernels.float8_operands import E4M3, E5M2

FLOAT8 = {"precision": {"preset": "bf16"}, "float8": {"linears": "all"}}
# e4m3 keeps 4 bits: half a step is 1/32 of a number near its largest; a product of a few dozen averages such errors
ROUNDING = 2.0**-5


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantised_values_use_the_whole_range(dtype: torch.dtype) -> None:
    values = torch.randn(64, 64) * 1e-3
    codes, scale = quantise(values, dtype)
    assert codes.float().abs().max() == torch.finfo(dtype).max
    error = (codes.float() * scale - values).abs().max() / values.abs().max()
    assert error <= 2.0 ** (-4 if dtype == E4M3 else -3)


def test_zeros_stay_zeros() -> None:
    codes, scale = quantise(torch.zeros(16, 16), E4M3)
    assert torch.isfinite(scale)
    assert not codes.float().any()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_and_its_gradients_are_near_those_of_bfloat16(has_bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16)
    layer = nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16)
    layer.load_state_dict(plain.state_dict())
    layer.__class__ = Float8Linear
    results = []
    for module in (plain, layer):
        rows = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        out = module(rows)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        results.append([out, rows.grad, module.weight.grad])
    for expected, found in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        error = (expected.float() - found.float()).norm() / expected.float().norm()
        assert 0 < error < 2 * ROUNDING


def test_a_model_trains_near_bfloat16_with_the_head_and_norms_untouched() -> None:
    engine, plain = build_engine("llama", FLOAT8), build_engine("llama", {"precision": {"preset": "bf16"}})
    for step in range(5):
        assert engine.step(global_batch(step)).loss == pytest.approx(plain.step(global_batch(step)).loss, rel=1e-2)
    kinds = {name: type(module) for name, module in engine.model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds.pop("lm_head") is nn.Linear
    assert list(kinds.values()) == [Float8Linear] * 42
    (technique,) = [row for row in fast_path(engine) if row.technique == "float8 products"]
    assert technique.on
    assert technique.why == "42 of 42 linear layers of the blocks, tensorwise, emulated in float32"


def test_auto_takes_the_layers_that_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "WORTH_IT", 1 / (1 / 32 + 1 / 48))  # what a tiny MLP has, and its attention has not
    engine = build_engine("llama", {**FLOAT8, "float8": {"linears": "auto"}})
    assert {name.rpartition(".")[2] for name, chosen in engine.float8.items() if chosen} == {
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_the_break_even_is_between_the_measured_shapes() -> None:
    assert [rule.takes_float8(2048, width, "auto") for width in (2048, 8192)] == [False, True]
    assert [rule.takes_float8(2048, width, "all") for width in (2048, 2056)] == [True, False]


@pytest.mark.parametrize(
    "tables",
    [{"precision": {"preset": "fp32"}}, {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}}],
)
def test_what_it_does_not_go_with_is_refused(tables: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match="float8"):
        build_engine("llama", {**FLOAT8, **tables})


def test_a_gpu_without_float8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    with pytest.raises(DeviceError, match="Old GPU has no float8 matmuls"):
        float8._require_float8(torch.device("cuda", 0))
    float8._require_float8(torch.device("cpu"))
