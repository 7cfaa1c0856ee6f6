"""The Triton form of AdamW with bfloat16 moments and weights: near float64, unbiased, the bits of the plain form."""

from __future__ import annotations

import pytest
import torch
from low_adamw import gradient, low_optimizer, require_near_float64
from tiny import FAMILIES, global_batch
from tolerances import BF16_SAME_LOSS_ABS, SAMPLING_SIGMAS
from torch import nn

from weft.core.plan import Plan
from weft.core.shards import Span, local_shard
from weft.engine.engine import Engine
from weft.engine.optim.adamw_low import AdamWLow, LowStates
from weft.engine.optim.optimizers import OptimizerPolicy, build_optimizer
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {"matrix": (300, 257), "vector": (1031,)}
# The two forms round float32 sums and products in other places: an element whose random bits are within that of the
# threshold goes the other way, and stays there. Expected: a few in 2^16 an update.
FLIPPED_SHARE = 2e-3


def start(device: torch.device, weights: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(device, weights)) for name, value in drawn.items()}


@pytest.mark.parametrize("weights", [F32, BF16], ids=["master", "master-free"])
@pytest.mark.parametrize("moments", [F32, BF16], ids=["float32-moments", "bfloat16-moments"])
def test_fifty_steps_stay_near_float64(weights: torch.dtype, moments: torch.dtype) -> None:
    require_near_float64(start(CUDA, weights), moments)


@pytest.mark.parametrize("weights", [F32, BF16], ids=["master", "master-free"])
def test_the_bits_are_those_of_the_plain_form(weights: torch.dtype) -> None:
    """Also with a factor, and where the steps before have gone apart in a few elements."""
    here, there = start(CPU, weights), start(CUDA, weights)
    plain, triton = low_optimizer(here, BF16), low_optimizer(there, BF16)
    for step in range(3):
        for index, name in enumerate(here):
            here[name].grad = gradient(SHAPES[name], step, index).to(weights)
            there[name].grad = here[name].grad.to(CUDA)  # type: ignore[union-attr]
        plain.gradient_factor, triton.gradient_factor = torch.tensor(0.3), torch.tensor(0.3, device=CUDA)
        plain.step()
        triton.step()
        for name in here:
            for key in ("exp_avg", "exp_avg_sq"):
                left, right = plain.state[here[name]][key], triton.state[there[name]][key].cpu()
                assert (left != right).double().mean() <= FLIPPED_SHARE, (step, name, key)
            if weights == BF16:
                assert (here[name] != there[name].cpu()).double().mean() <= FLIPPED_SHARE, (step, name)
            else:
                torch.testing.assert_close(here[name], there[name].cpu(), rtol=1e-5, atol=1e-6)


def test_a_part_rounds_as_the_whole_does() -> None:
    whole = {"matrix": start(CUDA, BF16)["matrix"]}
    gradients = gradient(SHAPES["matrix"], 0, 0).to(CUDA, BF16)
    shard = local_shard(
        SHAPES["matrix"], {0: [Span(begin=7, size=40)], 1: [Span(begin=5, size=20), Span(begin=30, size=9)]}
    )
    own, own_gradient = (torch.empty(shard.local_shape, dtype=BF16, device=CUDA) for _ in range(2))
    for chunk in shard.chunks:
        own[chunk.local_index] = whole["matrix"].detach()[chunk.global_index]
        own_gradient[chunk.local_index] = gradients[chunk.global_index]
    whole["matrix"].grad = gradients
    low_optimizer(whole, BF16).step()
    piece = nn.Parameter(own)
    piece.grad = own_gradient
    low_optimizer({"matrix": piece}, BF16, shard=shard).step()
    for chunk in shard.chunks:
        assert torch.equal(piece.detach()[chunk.local_index], whole["matrix"].detach()[chunk.global_index])


def test_rounding_keeps_the_mean() -> None:
    """A million weights of one value take a step far below what the format can hold: the mean takes it all the same."""
    parameter = nn.Parameter(torch.full((1024, 1024), 1.0, dtype=BF16, device=CUDA))
    low = low_optimizer({"w": parameter}, BF16, lr=1e-4)
    low.param_groups[0]["weight_decay"] = 0.0
    parameter.grad = torch.ones_like(parameter)
    low.step()
    steps = (1.0 - parameter.double()) / 2**-8  # below 1 the format has 2^-8
    assert set(steps.unique().tolist()) <= {0.0, 1.0}
    chance = 1e-4 / 2**-8
    error = SAMPLING_SIGMAS * (chance * (1 - chance) / parameter.numel()) ** 0.5
    assert abs(steps.mean().item() - chance) <= error + chance * 2**-7  # a bfloat16 number of float32 arithmetic
    square = low.state[parameter]["exp_avg_sq"].double()
    assert abs(square.mean().item() / (1 - 0.95) - 1) <= SAMPLING_SIGMAS * 2**-8 / parameter.numel() ** 0.5 + 1e-5


def engine_on(device: torch.device, precision: dict[str, str], zero: int) -> Engine:
    config = build_config(FAMILIES["llama"], vocab_size=257)
    skeleton = build_skeleton(config)
    return Engine(
        build_skeleton(config),
        Plan.from_tables({"precision": precision, "data_parallel": {"zero": zero}}),
        weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU),
        device=device,
    )


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_engine_trains_as_on_the_cpu(master: str, zero: int) -> None:
    precision = {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": master}
    here, there = engine_on(CPU, precision, zero), engine_on(CUDA, precision, zero)
    for step in range(5):
        expected, found = here.step(global_batch(step)).loss, there.step(global_batch(step)).loss
        assert found == pytest.approx(expected, abs=BF16_SAME_LOSS_ABS)
    assert all(record.ok for record in there.dtypes()), there.dtypes()


def test_large_tensors_in_float32_take_it_for_torchs_fused_update() -> None:
    config = build_config(FAMILIES["llama"], vocab_size=257)
    skeleton = build_skeleton(config)
    weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
    plan = Plan.from_tables({"precision": {"preset": "bf16"}})
    assert isinstance(Engine(build_skeleton(config), plan, weights=weights, device=CUDA).optimizer, torch.optim.AdamW)

    shapes, kept = {"matrix": (4096, 2048), "vector": (2048,)}, {}
    for kernel in ("auto", "fused"):
        generator = torch.Generator().manual_seed(0)
        named = {name: nn.Parameter(torch.randn(shape, generator=generator).to(CUDA)) for name, shape in shapes.items()}
        low = LowStates.of(named, plan.precision.policy(), seed=0, shards={}, copies={})
        assert low is not None
        optimizer = build_optimizer(list(named.values()), OptimizerPolicy(kernel=kernel), low=low)  # type: ignore[arg-type]
        assert isinstance(optimizer, AdamWLow) == (kernel == "auto")
        for step in range(5):
            for index, value in enumerate(named.values()):
                value.grad = gradient(value.shape, step, index).to(CUDA) * (1.0 if kernel == "auto" else 0.25)
            if isinstance(optimizer, AdamWLow):
                optimizer.gradient_factor = torch.tensor(0.25, device=CUDA)
            optimizer.step()
        kept[kernel] = named
    for name in shapes:
        torch.testing.assert_close(kept["auto"][name], kept["fused"][name], rtol=1e-6, atol=1e-7)
