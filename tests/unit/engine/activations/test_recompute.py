"""Recompute changes what is kept and how often a forward runs, never a bit of the result."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from tiny import CPU, FAMILIES, global_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft.engine.activations.recompute as recompute
from weft.core.errors import NoBlocksError, PlanError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.wrap_forward import wrap_forward
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

POLICIES = ("full", "selective")
LAYERS = 2
LLAMA, MIXTRAL = {**FAMILIES["llama"].config, "num_hidden_layers": LAYERS}, dict(FAMILIES["mixtral"].config)
MODELS = {
    **FAMILIES,
    "llama": ModelSpec(type="llama", config=LLAMA),
    # attention that writes its scores out, tied weights, a sliding window
    "gemma2": ModelSpec(
        type="gemma2",
        config={**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    ),
    "four": ModelSpec(type="llama", config={**LLAMA, "num_hidden_layers": 4}),
    # noise that is neither dropout nor attention dropout
    "jitter": ModelSpec(type="mixtral", config={**MIXTRAL, "router_jitter_noise": 0.3}),
}


def engine_of(
    family: str, policy: str, *, mixture: tuple[int, ...] = (), preset: str = "fp32", zero: int = 0, count: int = 2
) -> Engine:
    config = build_config(MODELS[family], vocab_size=257)
    skeleton = build_skeleton(config)
    plan = {
        "activations": {"policy": policy, "mixture": mixture},
        "precision": {"preset": preset},
        "data_parallel": {"zero": zero},
        "pipeline": {"microbatches": count},
    }
    weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
    return Engine(build_skeleton(config), Plan.from_tables(plan), weights=weights, device=CPU)


def small_batch(step: int = 0) -> dict[str, torch.Tensor]:
    return global_batch(step, rows=4, length=12)


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Of the second step: the weights have moved once."""
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda named: found.update({name: value.clone() for name, value in named.items()})
    for step in range(2):
        engine.step(small_batch(step))
    return found


def assert_same_bits(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        *((family, "fp32") for family in ("llama", "qwen3-tied", "gpt2", "mixtral", "gemma2", "jitter")),
        *((family, "bf16") for family in ("llama", "gpt2", "mixtral", "gemma2")),
    ],
)
def test_gradients_have_the_bits_of_no_recompute(family: str, preset: str) -> None:
    """GPT-2 drops 0.1 and two micro-batches have masks of their own; bf16 casts again from the masters."""
    expected = gradients(engine_of(family, "none", preset=preset))
    assert any(value.abs().max() > 0 for value in expected.values())
    for policy in POLICIES:
        assert_same_bits(expected, gradients(engine_of(family, policy, preset=preset)))


@pytest.mark.parametrize(
    ("family", "mixture", "zero"),
    [("four", (1, 1), 0), ("four", (2, 1), 3), ("four", (0, 0), 0), ("gpt2-four", (1, 2), 0), ("mixtral", (0, 1), 0)],
)
def test_a_budget_has_the_bits_of_no_recompute(family: str, mixture: tuple[int, int], zero: int) -> None:
    """GPT-2 drops 0.1 in blocks that are computed again and in those that are not."""
    expected = gradients(engine_of(family, "none", zero=zero))
    assert_same_bits(expected, gradients(engine_of(family, "budget", mixture=mixture, zero=zero)))


@pytest.mark.parametrize(
    ("mixture", "sentence"), [((), "has no activations.mixture"), ((3, 2), "is 5 blocks, but the model has 4")]
)
def test_a_budget_that_is_open_or_too_large_is_refused(mixture: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        engine_of("four", "budget", mixture=mixture)
    assert caught.value.hint


@pytest.mark.parametrize(("policy", "preset"), [("full", "bf16"), ("selective", "fp16")])
def test_sharded_units_are_gathered_around_what_is_repeated(policy: str, preset: str) -> None:
    expected = gradients(engine_of("gpt2", "none", preset=preset, zero=3))
    assert_same_bits(expected, gradients(engine_of("gpt2", policy, preset=preset, zero=3)))


class Operators(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def operators(policy: str, *, family: str = "llama", mixture: tuple[int, ...] = ()) -> Counter[str]:
    engine = engine_of(family, policy, mixture=mixture, count=1)
    with Operators() as seen:  # type: ignore[no-untyped-call]
        engine.step(small_batch())
    return seen.counts


def test_full_runs_a_block_twice_and_selective_only_what_is_cheap() -> None:
    plain, full, selective = (operators(policy) for policy in ("none", *POLICIES))
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert (plain[attention], full[attention], selective[attention]) == (LAYERS, 2 * LAYERS, LAYERS)
    # seven linears a block; of the last one only the input is wanted, so torch stops before or after it
    assert 6 * LAYERS <= full["aten.mm"] - plain["aten.mm"] <= 7 * LAYERS
    assert selective["aten.mm"] == plain["aten.mm"]
    assert full["aten.silu"] == selective["aten.silu"] == 2 * plain["aten.silu"] == 2 * LAYERS


def test_a_budget_runs_its_blocks_again_and_no_other() -> None:
    plain = operators("none", family="four")
    attention, silu = "aten._scaled_dot_product_flash_attention_for_cpu", "aten.silu"
    for full, selective in ((1, 2), (2, 0), (0, 3), (4, 0), (0, 0)):
        found = operators("budget", family="four", mixture=(full, selective))
        assert found[attention] - plain[attention] == full
        assert found[silu] - plain[silu] == full + selective


def test_every_operator_that_is_kept_exists() -> None:
    """Names of operators are torch's own; one that is renamed would be recomputed without a word."""
    named = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_flash_attention_forward", "_efficient_attention_forward")
    fused = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for name in (*named, *(f"_scaled_dot_product_{kernel}" for kernel in fused)):
        assert recompute.is_saved(getattr(torch.ops.aten, name).default)
    assert recompute.is_saved(torch.ops.weft.scaled_mm.default)
    assert not any(recompute.is_saved(getattr(torch.ops.aten, name).default) for name in ("bmm", "baddbmm", "silu"))


def test_evaluation_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", "full")

    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(recompute, "checkpoint", refuse)
    assert engine.evaluate(small_batch()).loss > 0
    with pytest.raises(ZeroDivisionError):
        engine.step(small_batch())


@pytest.mark.parametrize("policy", POLICIES)
def test_masters_stay_and_the_weights_of_both_forwards_are_seen(policy: str) -> None:
    """torch ends a recomputation with an exception in the middle of a forward."""
    engine = engine_of("llama", policy, preset="bf16")
    engine.step(small_batch())
    assert all(isinstance(p, nn.Parameter) and p.dtype is torch.float32 for p in engine.model.parameters())
    found = {record.component: record for record in engine.dtypes()}
    assert found["weights"].found == found["activations"].found == ("bfloat16",)
    assert all(record.ok for record in found.values())


class Normed(nn.Module):
    """A plain module whose blocks count batches, take keywords of checkpoint's names and return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.body = nn.ModuleDict({"a": Block(), "b": Block()})
        self.head = nn.Linear(8, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        for block in self.body.values():
            x, _ = block(x, debug=2.0)
        logits: torch.Tensor = self.head(x)
        return logits.unflatten(0, ids.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, debug: float) -> tuple[torch.Tensor, float]:
        return x + self.norm(self.linear(x)).tanh() * debug, debug


def normed_engine(policy: str) -> Engine:
    torch.manual_seed(0)
    return Engine(
        Normed(), Plan.from_tables({"activations": {"policy": policy}}), blocks=["body.a", "body.b"], device=CPU
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_any_module_with_named_blocks(policy: str) -> None:
    expected, found = normed_engine("none"), normed_engine(policy)
    assert_same_bits(gradients(expected), gradients(found))
    names = [name for name, _ in expected.model.named_parameters()]
    assert [name for name, _ in found.model.named_parameters()] == names
    assert_same_bits(dict(expected.model.named_buffers()), dict(found.model.named_buffers()))  # counted once


def test_without_blocks_there_is_nothing_to_recompute() -> None:
    with pytest.raises(NoBlocksError, match="nothing to recompute"):
        Engine(nn.Linear(4, 4), Plan.from_tables({"activations": {"policy": "full"}}), device=CPU)


def test_a_copied_module_has_a_forward_of_its_own() -> None:
    linear = nn.Linear(2, 2)
    wrap_forward(linear, lambda forward, x: forward(x) + 1)
    other = copy.deepcopy(linear)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    assert torch.equal(other(torch.ones(1, 2)), torch.ones(1, 2))
    assert list(inspect.signature(linear.forward).parameters) == ["input"]
