"""Pairs have the curve of one process in every layout that trains them; so has their reference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from pairs import pair_settings, write_pairs
from safetensors.torch import load_file
from samples import by_default
from tiny import FAMILIES, build_engine
from tiny_run import metrics, train_here
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.core.objective_spec import ObjectiveSpec
from weft.engine.preference import REFERENCE, objective_of
from weft.engine.reference import row_log_probs
from weft.train.folder.run_folder import RunFolder

STEPS, PAIRS, LENGTH = 5, 8, 16
ACCUMULATED = {"pipeline": {"microbatches": 2}}
SHARD = {"dp_shard": 2}
OF_TWO: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}, **ACCUMULATED},
    "ZeRO-1": {"mesh": SHARD, "data_parallel": {"zero": 1}, **ACCUMULATED},
    "ZeRO-2": {"mesh": SHARD, "data_parallel": {"zero": 2}, **ACCUMULATED},
    "ZeRO-3, recompute": {"mesh": SHARD, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    "tp": {"mesh": {"tp": 2}, **ACCUMULATED},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
    "zero bubble": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble", "microbatches": 4}},
    "tp, full logits": {
        "mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False, "loss_parallel": False},
    },
}  # fmt: skip
OF_FOUR: dict[str, dict[str, Any]] = {
    "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
    "pp x ZeRO-1": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "data_parallel": {"zero": 1},
        "pipeline": {"microbatches": 2, "schedule": "1f1b"},
    },
    "pp x tp": {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"microbatches": 4, "schedule": "1f1b"}},
    "ZeRO-3 x tp": {"mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 3}, **ACCUMULATED},
}
OF_FOUR_BLOCKS: dict[str, dict[str, Any]] = {
    "interleaved": {
        "mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "microbatches": 4, "virtual_stages": 2},
    },
    "zbv": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "microbatches": 4, "virtual_stages": 2}},
}  # fmt: skip
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
    "ep x tp": {"mesh": {"tp": 2, "ep": 2}},
}
OBJECTIVES = {"sigmoid": {"label_smoothing": 0.1}, "ipo": {"loss": "ipo"}, "orpo": {"kind": "orpo"}}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Pairs of uneven answers; a rank has one that does not count."""
    tokens = torch.randint(0, 256, (2 * PAIRS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    for row in range(2 * PAIRS):
        labels[row, : 2 + row % 7] = -100
    labels[:2] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def curve_of(family: str, plan: dict[str, Any], keys: dict[str, Any]) -> list[dict[str, float]]:
    spec = ObjectiveSpec(**{"kind": "dpo", **keys})
    model = FAMILIES[family].model_copy(update={"head": "scalar" if spec.kind == "reward" else "tokens"})
    engine = build_engine(model, plan, objective=objective_of(spec))
    batches = [engine.share_of(batch_of(step)) for step in range(STEPS)]
    references = [row_log_probs(engine, batch) for batch in batches]
    found = []
    for batch, reference in zip(batches, references, strict=True):
        record = engine.step({**batch, REFERENCE: reference}, learning_rate=1e-3)
        found.append({"loss": record.loss, "norm": record.grad_norm, **(record.figures or {})})
    return found


def curves(
    _rank: int, _world: int, family: str, names: list[str], keys: dict[str, Any]
) -> dict[str, list[dict[str, float]]]:
    plans = {"one": {}, **OF_TWO, **OF_FOUR, **OF_FOUR_BLOCKS, **OF_EXPERTS}
    found = {name: curve_of(family, plans[name], keys) for name in names}
    dist.barrier()
    return found


def require_same(world: int, names: list[str], keys: dict[str, Any], *, family: str = "qwen3-tied") -> None:
    expected = run_ranks(curves, 1, family, ["one"], keys)[0]["one"]
    for name, found in run_ranks(curves, world, family, names, keys, timeout_s=240.0)[0].items():
        for one, other in zip(expected, found, strict=True):
            assert abs(one["loss"] - other["loss"]) <= SAME_CURVE_LOSS_ABS, name
            assert abs(one["norm"] - other["norm"]) <= SAME_CURVE_NORM_REL * one["norm"], name
            for key in ("reward_chosen", "reward_margin", "reward_accuracy"):
                assert abs(one[key] - other[key]) <= SAME_CURVE_LOSS_ABS, f"{key} under {name}"
    assert len({one["loss"] for one in expected}) == STEPS


def test_pairs_have_the_curve_of_one_process() -> None:
    require_same(2, ["ZeRO-3, recompute", "tp", "pp"], OBJECTIVES["sigmoid"])


def test_a_reward_model_has_the_curve_of_one_process() -> None:
    require_same(2, ["ZeRO-3, recompute", "pp"], {"kind": "reward"})


@pytest.mark.parametrize("world", by_default([], [2, 4], extended=[2]))
def test_a_reward_model_in_every_layout(world: int) -> None:
    names = [name for name, plan in (OF_TWO if world == 2 else OF_FOUR).items() if "tp" not in plan["mesh"]]
    require_same(world, names, {"kind": "reward", "center": 0.05})


@pytest.mark.extended
def test_a_reward_model_with_experts_and_a_looped_pipeline() -> None:
    require_same(2, ["ep"], {"kind": "reward"}, family="mixtral")
    require_same(2, [*OF_FOUR_BLOCKS], {"kind": "reward"}, family="qwen3-four")


CASES = [(name, world) for name in OBJECTIVES for world in (2, 4)]


@pytest.mark.parametrize(("name", "world"), by_default([], CASES, extended=[("sigmoid", 2)]))
def test_every_layout(name: str, world: int) -> None:
    require_same(world, list(OF_TWO if world == 2 else OF_FOUR), OBJECTIVES[name])


@pytest.mark.extended
@pytest.mark.parametrize(("family", "names"), [("qwen3-four", [*OF_FOUR_BLOCKS]), ("mixtral", [*OF_EXPERTS])])
def test_looped_pipelines_and_experts(family: str, names: list[str]) -> None:
    require_same(2, names, OBJECTIVES["sigmoid"], family=family)


def train_rank(_rank: int, _world: int, cache: str, out: str, pairs: str, plan: dict[str, Any]) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    settings = {**pair_settings(), "data.eval_fraction": 0.2, "evaluation": {"every": 3, "batches": 1}}
    train_here(Path(out), Path(pairs), settings, plan=plan)


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": SHARD, "data_parallel": {"zero": 3}, **ACCUMULATED},
        pytest.param(OF_TWO["pp"] | {"pipeline": {"schedule": "1f1b", "microbatches": 2}}, marks=pytest.mark.extended),
    ],
    ids=["zero3", "pipeline"],
)
def test_a_run_of_ranks_fills_the_table_of_one(plan: dict[str, Any], tmp_path: Path) -> None:
    """The pairs are no multiple of a global batch, so ranks repeat some."""
    pairs, cache = write_pairs(tmp_path / "pairs.jsonl", count=19), str(tmp_path / "cache")
    run_ranks(train_rank, 1, cache, str(tmp_path / "one"), str(pairs), {})
    run_ranks(train_rank, 2, cache, str(tmp_path / "two"), str(pairs), plan)
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=SAME_CURVE_LOSS_ABS)
        assert two["figures"] == pytest.approx(one["figures"], abs=SAME_CURVE_LOSS_ABS)
        assert two.get("eval_loss") == pytest.approx(one.get("eval_loss"), abs=SAME_CURVE_LOSS_ABS)
    one_file, two_file = (load_file(RunFolder(tmp_path / name).reference_path) for name in ("one", "two"))
    assert one_file.keys() == two_file.keys() == {"training", "held-out"}
    for name, table in one_file.items():
        torch.testing.assert_close(two_file[name], table, atol=1e-3, rtol=1e-6, equal_nan=True)
