"""One-dimensional tensor parallelism has the curve of one process, alone and with every data-parallel strategy.

Checkpoints written on one degree are loaded bit by bit on others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.verify.evidence import full_tensor

STEPS = 6
Curve = list[tuple[float, float]]


def tables(tp: int, *, stream: bool, slices: bool, **rest: Any) -> dict[str, Any]:
    mesh = {"tp": tp, **rest.pop("mesh", {})}
    return {
        "mesh": mesh,
        "tensor_parallel": {"sequence_parallel": stream, "loss_parallel": slices},
        "pipeline": {"microbatches": 2},
        **rest,
    }


def layouts(world: int) -> dict[str, dict[str, Any]]:
    if world == 1:
        return {"single": {"pipeline": {"microbatches": 2}}}
    if world == 2:
        return {
            "tp 2": tables(2, stream=False, slices=False),
            "tp 2, stream": tables(2, stream=True, slices=False),
            "tp 2, loss": tables(2, stream=False, slices=True),
            "tp 2, both, full recompute": tables(2, stream=True, slices=True, activations={"policy": "full"}),
            "tp 2, selective recompute": tables(2, stream=False, slices=True, activations={"policy": "selective"}),
        }
    return {
        "tp 4, both": tables(4, stream=True, slices=True),
        "tp 2 x DDP 2": tables(2, stream=True, slices=True, mesh={"dp_replicate": 2}),
        **{
            f"tp 2 x ZeRO-{zero} 2": tables(
                2, stream=zero != 2, slices=True, mesh={"dp_shard": 2}, data_parallel={"zero": zero}
            )
            for zero in (1, 2, 3)
        },
    }


def curves(rank: int, world: int, family: str) -> dict[str, Curve]:
    found = {name: train_steps(build_engine(family, plan), STEPS) for name, plan in layouts(world).items()}
    dist.barrier()
    return found


CASES = by_default(
    [("qwen3-tied", 4)],  # repeated key-value heads
    [(family, world) for family in ("llama", "qwen3-tied", "gpt2", "mixtral") for world in (2, 4)],
)


@pytest.mark.parametrize(("family", "world"), CASES)
def test_every_layout_has_the_curve_of_one_process(family: str, world: int) -> None:
    [expected] = run_ranks(curves, 1, family)[0].values()
    assert len({loss for loss, _ in expected}) == STEPS  # a curve, not a constant
    per_rank = run_ranks(curves, world, family, timeout_s=240.0)
    assert all(found == per_rank[0] for found in per_rank), "ranks disagree about their own curve"
    for name, found in per_rank[0].items():
        loss_diff = max(abs(a[0] - b[0]) for a, b in zip(expected, found, strict=True))
        norm_diff = max(abs(a[1] - b[1]) / a[1] for a, b in zip(expected, found, strict=True))
        assert loss_diff <= SAME_CURVE_LOSS_ABS, f"{family} under {name}: losses differ by {loss_diff:.1e}"
        assert norm_diff <= SAME_CURVE_NORM_REL, f"{family} under {name}: norms differ by {norm_diff:.1e}"


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(full_tensor(tensor).numpy().tobytes()).hexdigest() for name, tensor in state.items()}


WIDE = tables(4, stream=True, slices=True)  # 2 key-value heads: on four ranks they are repeated
MIXED = tables(2, stream=True, slices=True, mesh={"dp_shard": 2}, data_parallel={"zero": 3})


def save_and_exchange(rank: int, world: int, folder: str) -> list[dict[str, str]]:
    """Each of two layouts saves; then each loads what the other has saved."""
    found = []
    for name, plan in (("wide", WIDE), ("mixed", MIXED)):
        engine = build_engine("qwen3-tied", plan)
        train_steps(engine, 2)
        engine.save(Path(folder) / name)
        found.append(digests(engine.state()))
    for name, plan in (("wide", MIXED), ("mixed", WIDE)):
        engine = build_engine("qwen3-tied", plan)
        assert engine.load(Path(folder) / name) == 2
        found.append(digests(engine.state()))
    return found


def load_alone(rank: int, world: int, folder: str) -> tuple[Curve, dict[str, tuple[dict[str, str], Curve]]]:
    """The uninterrupted curve, and what one process makes of the checkpoints."""
    engine = build_engine("qwen3-tied", {})
    expected = train_steps(engine, 4)[2:]
    found = {}
    for name in ("wide", "mixed"):
        engine = build_engine("qwen3-tied", {})
        engine.load(Path(folder) / name)
        found[name] = digests(engine.state()), train_steps(engine, 2, first=2)
    return expected, found


@pytest.mark.extended
def test_a_checkpoint_goes_from_any_degree_to_any_other(tmp_path: Path) -> None:
    for wide, mixed, wide_on_mixed, mixed_on_wide in run_ranks(save_and_exchange, 4, str(tmp_path), timeout_s=240.0):
        assert wide_on_mixed == wide
        assert mixed_on_wide == mixed
    [(expected, alone)] = run_ranks(load_alone, 1, str(tmp_path))
    for name, saved in (("wide", wide), ("mixed", mixed)):
        found, curve = alone[name]
        assert found == saved
        assert max(abs(a[0] - b[0]) for a, b in zip(expected, curve, strict=True)) <= SAME_CURVE_LOSS_ABS
