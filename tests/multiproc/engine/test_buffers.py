"""Buffers that forwards change are those of one process, on every rank and layout: in values, checkpoints, evaluation.

Batch statistics are taken over the micro-batch of all data-parallel ranks. One process sees the same micro-batches when
it is given its rows in that order (`as_ranks_see_it`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from buffered import ROWS, WIDTH, build, global_batch, own_buffers, train
from gloo_ranks import run_ranks
from tiny import FAMILIES
from tiny import global_batch as tiny_batch
from torch import Tensor, nn

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

STEPS = 3
TWO: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}},
    "ddp in two": {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    "zero-1 in two": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 2}},
    "zero-2": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}},
    "zero-3 recomputed": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    "1f1b": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
    "interleaved, recomputed": {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "microbatches": 4, "virtual_stages": 2},
        "activations": {"policy": "selective"},
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
    "zero-1, zbv": {
        "mesh": {"dp_shard": 2, "pp": 2},
        "data_parallel": {"zero": 1},
        "pipeline": {"schedule": "zbv", "microbatches": 4, "virtual_stages": 2},
    },
}
Arrays = dict[str, npt.NDArray[Any]]
Found = tuple[list[float], Arrays, list[float], Arrays, dict[str, str]]


def trained(rank: int, world: int, plans: dict[str, dict[str, Any]], folder: str) -> dict[str, Found]:
    return {name: one(plan, Path(folder) / name.replace(" ", "-")) for name, plan in plans.items()}


def one(plan: dict[str, Any], folder: Path) -> Found:
    """A run, its buffers; and the same after a checkpoint was loaded into a fresh engine, one step on."""
    with build(plan) as engine:
        losses = train(engine, STEPS)
        buffers = arrays(engine)
        engine.save(folder)
        states = {record.name: record.state for record in engine.buffers()}
    with build(plan) as engine:
        engine.load(folder)
        later = train(engine, 1, first=STEPS)
        return losses, buffers, later, arrays(engine), states


def as_ranks_see_it(plan: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """One process's plan, and the order of rows in which its micro-batches are those of all ranks together."""
    cuts = plan.get("pipeline", {}).get("microbatches", 1)
    degree = plan["mesh"].get("dp_replicate", 1) * plan["mesh"].get("dp_shard", 1)
    rows = torch.arange(ROWS).view(degree, cuts, -1).transpose(0, 1).reshape(-1)
    return {"pipeline": {"microbatches": cuts}}, rows


def right_of(plan: dict[str, Any]) -> tuple[list[float], Arrays, list[float], Arrays]:
    tables, rows = as_ranks_see_it(plan)
    engine = build(tables)

    def steps(first: int, count: int) -> list[float]:
        taken = [
            {key: value[rows] for key, value in global_batch(step).items()} for step in range(first, first + count)
        ]
        losses = [engine.step(batch, learning_rate=1e-2).loss for batch in taken]
        return [*losses, engine.evaluate(global_batch(99)).loss]

    losses, buffers = steps(0, STEPS), arrays(engine)
    return losses, buffers, steps(STEPS, 1), arrays(engine)


def arrays(engine: Engine) -> Arrays:
    return {name: value.numpy() for name, value in own_buffers(engine).items()}


def assert_right(plans: dict[str, dict[str, Any]], found: list[dict[str, Found]]) -> None:
    for name, plan in plans.items():
        losses, buffers, later, later_buffers = right_of(plan)
        for rank, of_rank in enumerate(found):
            assert of_rank[name][0] == pytest.approx(losses, rel=1e-5), (name, rank)
            assert of_rank[name][2] == pytest.approx(later, rel=1e-5), (name, rank)
            assert_close(of_rank[name][1], buffers, where=f"{name}, rank {rank}")
            kept = {key: value for key, value in later_buffers.items() if not key.endswith("recent")}
            assert_close({key: of_rank[name][3][key] for key in kept if key in of_rank[name][3]}, kept, where=name)
        assert {key for of_rank in found for key in of_rank[name][1]} == set(buffers), name
        assert_equal_bits([of_rank[name][1] for of_rank in found], where=name)


def assert_close(found: Arrays, right: Arrays, *, where: str) -> None:
    for key, value in found.items():
        np.testing.assert_allclose(value, right[key], rtol=1e-4, atol=1e-5, err_msg=f"{where}: {key}")


def assert_equal_bits(found: list[Arrays], *, where: str) -> None:
    for key in {key for of_rank in found for key in of_rank}:
        first, *others = [of_rank[key] for of_rank in found if key in of_rank]
        assert all(np.array_equal(first, other) for other in others), (where, key)


def test_two_ranks_have_the_buffers_of_one_process(tmp_path: Path) -> None:
    found = run_ranks(trained, 2, TWO, str(tmp_path))
    assert_right(TWO, found)
    states = found[0]["ddp"][4]
    assert states["blocks.0.norm.running_mean"] == "statistics over all data-parallel ranks"
    assert states["blocks.0.kept.mean"] == "averaged after every micro-batch"
    assert states["blocks.0.kept.count"] == "rank 0's after every step"
    assert states["blocks.0.kept.table"] == "constant"


class FirstRow(nn.Module):
    """Keeps an integer of the rows that it saw last: of all ranks' values none is an average."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("last", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.last.copy_(first_value(inputs))
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)  # type: ignore[no-any-return]


def first_value(rows: Tensor) -> Tensor:
    return (1000 * rows[0, 0]).long()


def last_values(rank: int, world: int, plans: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(the buffer after a step, the value of this rank's own rows), plan by plan."""
    found = []
    for plan in plans:
        with build(plan, model=FirstRow()) as engine:
            rows = engine.share_of(global_batch(0))
            engine.step(rows)
            found.append((int(engine.model.last), int(first_value(rows["inputs"]))))  # type: ignore[operator]
    return found


def test_an_integer_is_rank_0s_on_every_rank() -> None:
    first, second = run_ranks(last_values, 2, [TWO["ddp"], TWO["zero-2"]])
    for (of_first, own), (of_second, others) in zip(first, second, strict=True):
        assert own != others  # else nothing would have to be sent
        assert of_first == of_second == own


class Drawn(nn.Module):
    """Draws buffers at random, one of them outside the blocks, so that every rank begins with others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("noise", torch.randn(WIDTH))
        self.blocks[1].register_buffer("mask", torch.rand(3, WIDTH) > 0.5)
        self.register_buffer("same", torch.ones(WIDTH, dtype=torch.bfloat16), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.noise * self.same
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)  # type: ignore[no-any-return]


def drawn_buffers(rank: int, world: int, plans: dict[str, dict[str, Any]]) -> tuple[Arrays, Arrays, dict[str, Arrays]]:
    """A rank's own buffers, those after torch's DDP has wrapped the model, and those of an engine, by plan."""

    def draw() -> nn.Module:
        torch.manual_seed(100 + rank)
        return Drawn()

    def values(model: nn.Module) -> Arrays:
        return {name: value.float().numpy().copy() for name, value in model.named_buffers()}

    own, wrapped, found = values(draw()), values(nn.parallel.DistributedDataParallel(draw()).module), {}
    for name, plan in plans.items():
        with build(plan, model=draw()) as engine:
            found[name] = values(engine.model)
    return own, wrapped, found


def test_buffers_begin_with_the_values_that_torchs_ddp_gives_them() -> None:
    plans = {name: TWO[name] for name in ("ddp", "zero-1 in two", "zero-2", "zero-3 recomputed", "1f1b")}
    ranks = run_ranks(drawn_buffers, 2, plans)
    assert not np.array_equal(ranks[0][0]["noise"], ranks[1][0]["noise"])  # else nothing would have to be sent
    for _, wrapped, found in ranks:
        assert_equal_bits([wrapped, ranks[0][0]], where="torch's DDP")
        for name, values in found.items():
            assert_equal_bits([values, {key: wrapped[key] for key in values}], where=name)


def watched_llama(rank: int, world: int, plan: dict[str, Any]) -> Arrays:
    """Buffers of a Llama after two steps: a moving average and a counter."""
    config = build_config(FAMILIES["llama"], vocab_size=257)
    skeleton, values = build_skeleton(config), build_skeleton(config)
    block = skeleton.model.layers[1]
    block.register_buffer("size", torch.zeros(()))
    block.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training:
            module.size.mul_(0.5).add_(inputs[0].detach().abs().mean(), alpha=0.5)
            module.count += 1

    block.register_forward_pre_hook(look)
    weights = InitialWeights(values, describe(values), seed=0, device=torch.device("cpu"))
    with Engine(skeleton, Plan.from_tables(plan), weights=weights, device="cpu") as engine:
        for step in range(2):
            engine.step(engine.share_of(tiny_batch(step)))
        return {key: value.numpy().copy() for key, value in block.named_buffers(recurse=False)}


def test_tensor_parallel_ranks_have_the_buffers_of_one_process() -> None:
    first, second = run_ranks(watched_llama, 2, {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}})
    assert_equal_bits([first, second], where="tp")
    assert_close(first, watched_llama(0, 1, {}), where="tp")
    assert first["size"] > 0
    assert first["count"] == 2


def test_a_checkpoint_has_the_values_of_the_stage_that_owns_a_buffer(tmp_path: Path) -> None:
    """Saved by four ranks in a pipeline, loaded by one process."""
    found = run_ranks(trained, 4, FOUR, str(tmp_path))
    assert_right(FOUR, found)
    engine = build()
    engine.load(tmp_path / "zero-1,-zbv")
    right = right_of(FOUR["zero-1, zbv"])[1]
    kept = {key: value for key, value in arrays(engine).items() if not key.endswith("recent")}
    assert_close(kept, right, where="one process")
