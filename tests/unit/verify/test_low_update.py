"""Updates judged from their own gradients: the optimizer as it is passes, each planted bug is named at its step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import low_mutations as bugs
import pytest
import torch
from torch import nn

from weft.core.precision import resolve
from weft.core.run_spec import TrainSpec
from weft.engine.optim.adamw_low import AdamWLow, LowStates
from weft.engine.optim.clip import clip_factor
from weft.engine.optim.optimizers import decay_groups
from weft.engine.optim.rounding_bits import round_with
from weft.verify.low_update import LowPrecisionStep, LowUpdate, check_updates, rounded
from weft.verify.verdict import Check

TRAIN = TrainSpec(seed=3, weight_decay=0.1)
RATES = (5e-3, 1e-2)
SHAPES = {"matrix": (256, 192), "vector": (64,)}


def run(*, weights: str, moments: str, bug: Callable[[], Any] = nullcontext) -> Check:
    """Two updates of the engine's optimizer, with a bug or without, and the verdict on them."""
    policy = resolve("bf16", {"master_weights": weights, "optimizer_state": moments})  # type: ignore[dict-item]
    draw = torch.Generator().manual_seed(0)
    dtype = getattr(torch, weights)
    named = {
        name: nn.Parameter((0.02 * torch.randn(shape, generator=draw)).to(dtype)) for name, shape in SHAPES.items()
    }
    initial = {name: value.detach().clone() for name, value in named.items()}
    updates = []
    with bug():
        states = LowStates.of(named, policy, seed=TRAIN.seed, shards={}, copies={})
        assert states is not None
        groups = decay_groups(list(named.values()), TRAIN.weight_decay)
        optimizer = AdamWLow(groups, states=states, lr=0.0, betas=TRAIN.betas, eps=TRAIN.epsilon)
        for rate in RATES:
            for group in optimizer.param_groups:
                group["lr"] = rate
            for value in named.values():
                value.grad = torch.randn(value.shape, generator=draw).to(dtype)
            gradients = {name: value.grad.clone() for name, value in named.items() if value.grad is not None}
            norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm()
            optimizer.gradient_factor = clip_factor(norm, 0.25)
            optimizer.step()
            updates.append(
                LowPrecisionStep(
                    gradients=gradients,
                    norm=float(norm),
                    weights={name: value.detach().clone() for name, value in named.items()},
                    states={
                        f"{name}.{key}": optimizer.state[value][key].clone()
                        for name, value in named.items()
                        for key in ("exp_avg", "exp_avg_sq")
                    },
                )
            )
    how = LowUpdate(
        train=TRAIN,
        clip_norm=0.25,
        rates=RATES,
        rounds_moments=frozenset(("exp_avg", "exp_avg_sq") if moments == "bfloat16" else ()),
        rounds_weights=weights == "bfloat16",
    )
    return check_updates(how, initial, updates)


@pytest.mark.parametrize(
    ("weights", "moments"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_the_optimizer_as_it_is_passes(weights: str, moments: str) -> None:
    check = run(weights=weights, moments=moments)
    assert check.ok, check.detail
    assert check.margin < 0.5


@pytest.mark.parametrize(
    ("bug", "weights", "step", "word"),
    [
        (bugs.second_moment_rounded_to_nearest, "float32", 1, "exp_avg_sq"),
        (bugs.weight_rounded_to_nearest, "bfloat16", 1, "weight"),
        (bugs.weight_cut_off, "bfloat16", 1, "weight"),
        (bugs.bias_correction_forgotten, "float32", 1, "weight"),
        (bugs.bias_correction_forgotten, "bfloat16", 1, "weight"),
        (bugs.root_not_corrected, "bfloat16", 1, "weight"),
        (bugs.clipped_twice, "bfloat16", 1, "exp_avg"),
        (bugs.factor_kept_for_the_next_step, "float32", 2, "exp_avg"),
        (bugs.the_same_bits_every_step, "float32", 2, "exp_avg_sq"),
        (bugs.one_key_for_all_parameters, "float32", 1, "exp_avg_sq"),
        (bugs.moments_read_after_rounding, "float32", 1, "weight"),
    ],
)
def test_a_planted_bug_is_named(bug: Callable[[], Any], weights: str, step: int, word: str) -> None:
    check = run(weights=weights, moments="bfloat16", bug=bug)
    assert check.finding is not None
    assert check.finding.step == step
    assert word in check.detail


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_one_wrong_element_is_enough(value: float) -> None:
    def make(original: Any) -> Any:
        def step(self: AdamWLow) -> None:
            original(self)
            with torch.no_grad():
                self.param_groups[0]["params"][0][3, 4] = value

        return step

    check = run(weights="bfloat16", moments="bfloat16", bug=lambda: bugs.replaced(AdamWLow, "step", make))
    assert check.finding is not None
    assert "element [3, 4], the first of 1 wrong ones" in check.detail


def test_rounding_is_written_twice_and_agrees() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(4096, generator=draw) * 10.0 ** torch.randint(-30, 30, (4096,), generator=draw)
    bits = torch.randint(0, 2**16, (4096,), generator=draw, dtype=torch.int32)
    assert torch.equal(rounded(values, bits), round_with(values, bits))
    assert torch.equal(rounded(values, bits), rounded(values, bits).bfloat16().float())
