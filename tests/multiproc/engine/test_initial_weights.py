"""Same seed, same global weights, bit by bit, at any layout and world size; a rank holds one unit beyond its share."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from samples import by_default
from tiny import FAMILIES, build_engine
from torch.distributed.tensor import DTensor

from weft.engine.ownership import local
from weft.engine.weights import materialise
from weft.models.initial import InitialWeights
from weft.models.layout import describe

SHARDED: dict[str, Any] = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP x2": (2, {"mesh": {"dp_replicate": 2}}),
    "ZeRO-3 x2": (2, SHARDED),
    "ZeRO-3 x3": (3, {"mesh": {"dp_shard": 3}, "data_parallel": {"zero": 3}}),  # 32 rows do not divide by 3
    "HSDP 2x2": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}),
}


def digests(rank: int, world: int, plan: dict[str, Any], seed: int) -> dict[str, str]:
    """A digest of each parameter of each family, gathered whole."""
    found = {}
    for family in FAMILIES:
        engine = build_engine(family, plan, seed=seed)
        for name, parameter in engine.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[f"{family}:{name}"] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return run_ranks(digests, 1, {}, 0)[0]


@pytest.mark.parametrize("name", by_default(["HSDP 2x2"], LAYOUTS))
def test_the_weights_of_any_layout_are_those_of_one_process(name: str, reference: dict[str, str]) -> None:
    world, plan = LAYOUTS[name]
    for found in run_ranks(digests, world, plan, 0):
        assert found == reference


def test_another_seed_is_another_model(reference: dict[str, str]) -> None:
    other = run_ranks(digests, 1, {}, 1)[0]
    matrices = [name for name in reference if name.endswith("proj.weight")]
    assert len(matrices) > 20
    assert not any(other[name] == reference[name] for name in matrices)


def extra_bytes(rank: int, world: int) -> tuple[int, int, int]:
    """(most bytes alive beyond this rank's share while filling, the largest unit's, the model's)."""
    peak = 0
    original = InitialWeights.readers

    def watched(self: InitialWeights, names: list[str]) -> Any:
        nonlocal peak
        for name, read in original(self, names):
            real = [p for p in self._skeleton.parameters() if p.device.type != "meta"]
            peak = max(peak, sum(p.nbytes for p in real))
            yield name, read

    InitialWeights.readers = watched  # type: ignore[method-assign, assignment]
    engine = build_engine("llama", SHARDED)
    units: dict[str, int] = {}
    for name, parameter in engine.model.named_parameters():
        unit = describe(engine.model).unit_of[name]
        units[unit] = units.get(unit, 0) + parameter.numel() * 4
    own = sum(local(p).nbytes for p in engine.model.parameters())
    assert own < 0.51 * sum(units.values())
    return peak, max(units.values()), sum(units.values())


def test_a_rank_never_holds_more_than_one_unit_beyond_its_share() -> None:
    for peak, largest_unit, model in run_ranks(extra_bytes, 2):
        assert 0 < peak <= largest_unit < model


class Transposed(torch.nn.Module):
    """Parameters and buffers whose memory is not in order: they do not travel as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("table", torch.randn(1, 4).expand(1, 4).t().contiguous().t())
        self.register_buffer("counts", torch.randint(100, (4,)))


def placed(rank: int, world: int) -> tuple[list[float], list[float], list[int]]:
    torch.manual_seed(rank)
    module = Transposed()
    group = torch.distributed.group.WORLD
    assert group is not None
    materialise.place_real_model(module, device=torch.device("cpu"), group=group)
    table, counts = module.get_buffer("table"), module.get_buffer("counts")
    return module.weight.flatten().tolist(), table.flatten().tolist(), counts.tolist()


def test_a_module_with_values_takes_those_of_rank_0() -> None:
    first, second = run_ranks(placed, 2)
    assert first == second
    torch.manual_seed(0)
    assert first[0] == Transposed().weight.flatten().tolist()
