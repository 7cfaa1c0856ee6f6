"""AdamW with bfloat16 moments and weights: near float64, unbiased, the same bits in every cut, no memory of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from low_adamw import ADAM, gradient, low_optimizer, require_near_float64
from new_storages import NewStorages
from tiny import build_engine, train_steps
from tolerances import BF16_LOSS_ABS, SAMPLING_SIGMAS
from torch import nn

from weft.comm.groups import ensure_group
from weft.core.errors import BadValueError, CheckpointError
from weft.core.plan import Plan
from weft.core.shards import Span, local_shard
from weft.engine.mesh import build_topology
from weft.engine.optim.adamw_low import AdamWLow, LowStates, Place
from weft.engine.optim.adamw_low_update import PIECE_ELEMENTS
from weft.engine.optim.clip import global_norm
from weft.engine.optim.element_spans import spans_of
from weft.engine.optim.optimizers import OptimizerPolicy, build_optimizer, create_state, decay_groups, make_optimizer
from weft.engine.optim.rounding_bits import for_second_moment, for_weight, key_of, random_bits, round_with, words_of

BF16, F32 = torch.bfloat16, torch.float32


def given(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = {"matrix": torch.randn(96, 64, generator=generator) * 0.02, "vector": torch.ones(64)}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


@pytest.mark.parametrize("weights", [F32, BF16], ids=["master", "master-free"])
@pytest.mark.parametrize("moments", [F32, BF16], ids=["float32-moments", "bfloat16-moments"])
def test_fifty_steps_stay_near_float64(weights: torch.dtype, moments: torch.dtype) -> None:
    require_near_float64(given(weights), moments)


def test_with_float32_throughout_it_is_torchs_adamw() -> None:
    parameters = given(F32)
    others = [nn.Parameter(value.detach().clone()) for value in parameters.values()]
    low, right = low_optimizer(parameters, F32), torch.optim.AdamW(decay_groups(others, 0.1), **ADAM)
    for step in range(5):
        for index, (value, twin) in enumerate(zip(parameters.values(), others, strict=True)):
            value.grad = twin.grad = gradient(twin.shape, step, index)
        low.step()
        right.step()
    for value, twin in zip(parameters.values(), others, strict=True):
        torch.testing.assert_close(value, twin)


def test_rounding_keeps_the_mean_and_nearest_would_not() -> None:
    values = torch.linspace(0.1, 3.0, 10007).repeat(50)
    bits = random_bits(words_of(key_of(0, "w"), 7), torch.arange(values.numel()))
    for of_use in (for_second_moment, for_weight):
        error = ((round_with(values, of_use(bits)) - values) / values).double()
        assert error.abs().max() <= 2**-7
        assert abs(error.mean()) <= SAMPLING_SIGMAS * error.std() / values.numel() ** 0.5
    # a second moment that should double: the change of a step is a hundredth of what the format can hold
    stuck = going = torch.full((4096,), 1.0)
    for step in range(4000):
        stuck = (stuck * 0.9995 + 0.0005 * 2.0).bfloat16().float()
        bits = random_bits(words_of(key_of(0, "v"), step), torch.arange(4096))
        going = round_with(going * 0.9995 + 0.0005 * 2.0, for_second_moment(bits))
    exact = 2.0 - 0.9995**4000
    assert stuck.mean() == 1.0
    assert going.mean() == pytest.approx(exact, rel=2e-3)


def test_bits_are_evenly_spread_and_depend_on_all_they_should() -> None:
    elements = torch.arange(2**18)
    bits = random_bits(words_of(key_of(0, "w"), 1), elements)
    assert bits.unique().numel() == elements.numel()  # one to one
    for place in range(32):
        assert abs(((bits >> place) & 1).double().mean() - 0.5) <= SAMPLING_SIGMAS * 0.5 / elements.numel() ** 0.5
    others = {
        "seed": random_bits(words_of(key_of(1, "w"), 1), elements),
        "name": random_bits(words_of(key_of(0, "u"), 1), elements),
        "step": random_bits(words_of(key_of(0, "w"), 2), elements),
        "element": random_bits(words_of(key_of(0, "w"), 1), elements + 2**18),
        "far element": random_bits(words_of(key_of(0, "w"), 1), elements + 2**32),
    }
    scaled = bits.double() - bits.double().mean()
    for what, other in others.items():
        centred = other.double() - other.double().mean()
        correlation = (scaled * centred).sum() / (scaled.norm() * centred.norm())
        assert abs(correlation) <= SAMPLING_SIGMAS / elements.numel() ** 0.5, what


def test_values_that_fit_and_values_that_are_none_stay() -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -1.5, float("inf"), -float("inf")])
    for bits in (0, 0xFFFF):
        assert torch.equal(round_with(kept, torch.full((6,), bits, dtype=torch.int32)), kept)
    hidden = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(F32)  # not-a-numbers, by the lowest bits
    assert round_with(hidden, torch.full((2,), 0xFFFF, dtype=torch.int32)).isnan().all()


def test_spans_number_the_elements_of_any_part() -> None:
    whole = torch.arange(6 * 8 * 10).view(6, 8, 10)
    for runs in (
        {},
        {0: [Span(begin=2, size=3)]},
        {1: [Span(begin=1, size=2), Span(begin=5, size=3)]},
        {2: [Span(begin=4, size=5)]},
        {0: [Span(begin=1, size=4)], 2: [Span(begin=0, size=5)]},
        {1: [Span(begin=2, size=4)], 2: [Span(begin=3, size=2), Span(begin=7, size=3)]},
        {0: [Span(begin=3, size=0)]},
    ):
        shard = local_shard(whole.shape, runs)
        own = torch.full(shard.local_shape, -1)
        for chunk in shard.chunks:
            own[chunk.local_index] = whole[chunk.global_index]
        found = torch.full(shard.local_shape, -1)
        for span in spans_of(shard.chunks, shard.shape):
            rows = torch.arange(span.rows)[:, None] * span.row_step
            span.of(found).copy_(span.first + rows + torch.arange(span.columns))
        assert torch.equal(found, own), runs


def test_a_part_rounds_as_the_whole_does() -> None:
    """Columns and rows of a matrix, updated alone, have the bits that they have inside it."""
    whole = given(BF16)
    shape = whole["matrix"].shape
    gradients = gradient(shape, 0, 0).to(BF16)
    whole["matrix"].grad = gradients
    low_optimizer({"matrix": whole["matrix"]}, BF16).step()
    runs = {0: [Span(begin=7, size=40)], 1: [Span(begin=5, size=20), Span(begin=30, size=9)]}
    shard = local_shard(shape, runs)
    own, own_gradient = torch.empty(shard.local_shape, dtype=BF16), torch.empty(shard.local_shape, dtype=BF16)
    for chunk in shard.chunks:
        own[chunk.local_index] = given(BF16)["matrix"].detach()[chunk.global_index]
        own_gradient[chunk.local_index] = gradients[chunk.global_index]
    piece = nn.Parameter(own)
    piece.grad = own_gradient
    place = Place(key=key_of(0, "matrix"), spans=tuple(spans_of(shard.chunks, shard.shape)))
    states = LowStates(first=BF16, second=BF16, places={piece: place})
    AdamWLow(decay_groups([piece], 0.1), states=states, **ADAM).step()  # type: ignore[arg-type]
    for chunk in shard.chunks:
        assert torch.equal(piece.detach()[chunk.local_index], whole["matrix"].detach()[chunk.global_index])


def test_the_factor_is_that_of_scaled_gradients_and_is_used_once() -> None:
    first, second = given(F32), given(F32)
    scaled, folded = low_optimizer(first, BF16), low_optimizer(second, BF16)
    factor = torch.tensor(0.3)
    for step in range(3):
        for index, name in enumerate(first):
            own = gradient(first[name].shape, step, index)
            first[name].grad, second[name].grad = (own * factor if step == 1 else own), own
        folded.gradient_factor = factor if step == 1 else None
        scaled.step()
        folded.step()
        assert folded.gradient_factor is None
    for name in first:
        assert torch.equal(first[name], second[name])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(scaled.state[first[name]][key], folded.state[second[name]][key])


def test_making_state_changes_nothing_about_training() -> None:
    plain, made = given(BF16), given(BF16)
    expected, found = low_optimizer(plain, BF16), low_optimizer(made, BF16)
    for step in range(3):
        create_state(found, list(made.values()))
        for index, name in enumerate(plain):
            plain[name].grad = gradient(plain[name].shape, step, index).to(BF16)
            made[name].grad = gradient(plain[name].shape, step, index).to(BF16)
        expected.step()
        found.step()
    assert all(torch.equal(plain[name], made[name]) for name in plain)


def test_an_update_takes_no_memory_that_grows_with_the_model() -> None:
    parameter = nn.Parameter(torch.zeros(4 * PIECE_ELEMENTS // 512, 512, dtype=BF16))
    optimizer = low_optimizer({"w": parameter}, BF16)
    create_state(optimizer, [parameter])
    parameter.grad = torch.ones_like(parameter)
    states = list(optimizer.state[parameter].values())
    with NewStorages(known=[parameter, parameter.grad, *states]) as new:
        optimizer.step()
    assert new.peak_bytes <= 64


@pytest.mark.parametrize("kind", ["adam", "sgd", "adamw8bit"])
def test_other_optimizers_are_refused(kind: Any) -> None:
    plan = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
    with pytest.raises(BadValueError, match=f"need adamw, and the optimizer is {kind}") as caught:
        build_engine("llama", plan, optimizer=OptimizerPolicy(kind=kind))
    assert "train.optimizer = 'adamw'" in str(caught.value.hint)
    with pytest.raises(BadValueError, match="has a single kernel, and not 'foreach'"):
        build_engine("llama", plan, optimizer=OptimizerPolicy(kernel="foreach"))


def test_an_optimizer_of_ones_own_is_refused() -> None:
    plan = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
    with pytest.raises(BadValueError, match="the engine got another optimizer"):
        build_engine("llama", plan, optimizer=torch.optim.SGD)  # type: ignore[arg-type]


def test_a_parameter_that_is_transposed_in_memory_is_refused() -> None:
    from weft.core.precision import resolve

    transposed = {"w": nn.Parameter(torch.zeros(4, 8).t())}
    with pytest.raises(BadValueError, match="is not contiguous"):
        LowStates.of(transposed, resolve("bf16", {"optimizer_state": "bfloat16"}), seed=0, shards={}, copies={})


def test_without_the_options_the_optimizer_is_torchs() -> None:
    parameters = given(F32)
    assert isinstance(build_optimizer(list(parameters.values()), OptimizerPolicy()), torch.optim.AdamW)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_saving_and_going_on_has_the_same_bits(master: str, tmp_path: Any) -> None:
    plan = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": master}}
    straight = build_engine("llama", plan)
    train_steps(straight, 2)
    straight.save(tmp_path)
    expected = train_steps(straight, 2, first=2)
    resumed = build_engine("llama", plan)
    assert resumed.load(tmp_path) == 2
    assert train_steps(resumed, 2, first=2) == expected
    for key, value in straight.state().items():
        assert torch.equal(value, resumed.state()[key]), key


@pytest.mark.parametrize("key", ["optimizer_state", "master_weights"])
def test_a_checkpoint_of_other_formats_is_refused_in_one_sentence(key: str, tmp_path: Any) -> None:
    plain, low = {"precision": {"preset": "bf16"}}, {"precision": {"preset": "bf16", key: "bfloat16"}}
    for index, (saved, resumed) in enumerate(((plain, low), (low, plain))):
        folder = tmp_path / str(index)
        engine = build_engine("llama", saved)
        train_steps(engine, 1)
        engine.save(folder)
        formats = (
            "float32 in the checkpoint and bfloat16" if saved is plain else "bfloat16 in the checkpoint and float32"
        )
        with pytest.raises(CheckpointError, match=formats) as caught:
            build_engine("llama", resumed).load(folder)
        assert "precision" in str(caught.value.hint)


@pytest.mark.parametrize("kernel", ["whole", "fused"])
def test_weights_without_masters_train_near_those_with(kernel: str) -> None:
    """And the table of formats says so: nothing at rest in float32 but the loss."""
    low = {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": "bfloat16"}
    engine = build_engine("qwen3-tied", {"precision": low, "kernels": {"loss": kernel}})
    usual = build_engine("qwen3-tied", {"precision": {"preset": "bf16"}})
    found, expected = train_steps(engine, 4), train_steps(usual, 4)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=BF16_LOSS_ABS)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=BF16_LOSS_ABS)
    rows = {row.component: row for row in engine.dtypes()}
    assert all(row.ok for row in rows.values())
    for component in ("master_weights", "gradients", "first_moment", "second_moment", "weights"):
        assert rows[component].found == ("bfloat16",)
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1000, dtype=BF16))
    parameter.grad = torch.full_like(parameter, 1.0)
    ensure_group(device_type="cpu")
    topology = build_topology(Plan(), device_type="cpu")
    norm = global_norm({"w": parameter}, topology, shards={}, device=torch.device("cpu"))
    assert norm.item() == pytest.approx(1000**0.5, rel=1e-6)  # bfloat16 has 31.625


def test_all_in_float32_it_stands_for_torchs_adamw_alone() -> None:
    """Where it pays (on a GPU); a kernel that was named, another optimizer or one of the user's own is as asked."""
    parameters = given(F32)
    values = list(parameters.values())
    low = dataclasses.replace(low_optimizer(parameters, F32).states, rounds=False)
    own = build_optimizer(values, OptimizerPolicy(), low=low)
    assert isinstance(own, AdamWLow)
    assert not own.rounds
    assert isinstance(build_optimizer(values, OptimizerPolicy(kernel="fused"), low=low), torch.optim.AdamW)
    assert type(build_optimizer(values, OptimizerPolicy(kind="adam"), low=low)) is torch.optim.Adam
    assert isinstance(build_optimizer(values, OptimizerPolicy(kind="sgd"), low=low), torch.optim.SGD)
    mine = make_optimizer(parameters, lambda groups: torch.optim.SGD(groups, lr=0.1), low=low, shards={})
    assert isinstance(mine, torch.optim.SGD)


def test_all_in_float32_a_cpu_keeps_torchs() -> None:
    from weft.core.precision import resolve

    large = {"w": nn.Parameter(torch.zeros(1024, 1024))}
    assert LowStates.of(large, resolve("bf16", {}), seed=0, shards={}, copies={}) is None


def test_all_in_float32_it_is_torchs_update() -> None:
    ours, theirs = given(F32), given(F32)
    own, fused = low_optimizer(ours, F32), torch.optim.AdamW(decay_groups(list(theirs.values()), 0.1), **ADAM)
    for step in range(5):
        for index, (mine, other) in enumerate(zip(ours.values(), theirs.values(), strict=True)):
            mine.grad = gradient(mine.shape, step, index)
            other.grad = mine.grad * 0.25
        own.gradient_factor = torch.tensor(0.25)
        own.step()
        fused.step()
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
