"""Expert parallelism with tensor parallelism in the engine: the curve of one process, checkpoints, export, coverage.

Every step is clipped, so a curve that agrees has the norm of the full model.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_families import FAMILIES
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, global_batch, train_steps
from tolerances import BF16_LOSS_ABS, SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.checkpoint.store import peek_newest
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.export import model_tensors
from weft.models.hf_export import export_folder
from weft.verify.evidence import full_tensor

STEPS, CLIP_NORM = 4, 0.5
Curve = list[tuple[float, float]]


def plan(
    mesh: dict[str, int], zero: int, *, stream: bool, microbatches: int = 1, tensor: str = "folded", **tables: Any
) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "data_parallel": {"zero": zero},
        "tensor_parallel": {"sequence_parallel": stream},
        "expert_parallel": {"tensor": tensor},
        "pipeline": {"microbatches": microbatches},
        **tables,
    }


TWO = {"tp": 2, "ep": 2}
FOUR = {"tp": 2, "dp_shard": 2, "ep": 2}
WIDER = {"tp": 2, "dp_shard": 2, "ep": 4}
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {
        "folded, sequence parallel": plan(TWO, 0, stream=True, microbatches=4),
        "folded": plan(TWO, 0, stream=False),
        "folded, ZeRO-3 of one rank": plan(TWO, 3, stream=False, microbatches=4, activations={"policy": "full"}),
    },
    4: {
        "folded, sequence parallel, ZeRO-2": plan(FOUR, 2, stream=True, microbatches=4),
        "folded, ep 4, ZeRO-3": plan(WIDER, 3, stream=False),
        "width, sequence parallel, ZeRO-3": plan(FOUR, 3, stream=True, tensor="width"),
        "width, ZeRO-2": plan(FOUR, 2, stream=False, microbatches=4, tensor="width"),
    },
}
OTHERS = {
    "folded, ZeRO-3, recompute": plan(FOUR, 3, stream=True, activations={"policy": "full"}),
    "folded, ep 4, sequence parallel, ZeRO-2": plan(WIDER, 2, stream=True, microbatches=4),
    "folded, ZeRO-2": plan(FOUR, 2, stream=False),
    "width, ZeRO-1, recompute": plan(FOUR, 1, stream=True, tensor="width", activations={"policy": "full"}),
    "replicas of experts inside tp": plan({"tp": 4, "ep": 2}, 0, stream=False),
    "DDP": plan({"dp_replicate": 2, **TWO}, 0, stream=True, microbatches=2),
    "HSDP": plan({"dp_replicate": 2, **TWO}, 3, stream=False),
    "pp 2": plan({"pp": 2, **TWO}, 0, stream=True, microbatches=4),
}


def build(family: str, tables: dict[str, Any]) -> Engine:
    spec = ModelSpec(type=family, config=FAMILIES[family])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_engine(spec, tables, clip_norm=CLIP_NORM)


def curves(rank: int, world: int, family: str, plans: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    found = {}
    for name, tables in plans.items():
        with build(family, tables) as engine:
            found[name] = train_steps(engine, STEPS)
    return found


def assert_same_curves(family: str, world: int, plans: dict[str, dict[str, Any]]) -> None:
    expected = run_ranks(curves, 1, family, PLANS[1])[0]["alone"]
    assert all(norm > CLIP_NORM for _, norm in expected), expected  # every step is clipped
    per_rank = run_ranks(curves, world, family, plans, timeout_s=300.0)
    assert all(found == per_rank[0] for found in per_rank), "ranks disagree about their own curve"
    for name, found in per_rank[0].items():
        for (loss, norm), (other_loss, other_norm) in zip(expected, found, strict=True):
            assert other_loss == pytest.approx(loss, abs=SAME_CURVE_LOSS_ABS), name
            assert other_norm == pytest.approx(norm, rel=SAME_CURVE_NORM_REL), name


TESTED = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
CASES = by_default(
    [("deepseek_v3", 2)], [(family, world) for family in TESTED for world in (2, 4)], extended=[("mixtral", 4)]
)


@pytest.mark.parametrize(("family", "world"), CASES)
def test_every_layout_has_the_curve_of_one_process(family: str, world: int) -> None:
    assert_same_curves(family, world, PLANS[world])


@pytest.mark.slow
@pytest.mark.parametrize("family", TESTED)
def test_other_axes_go_along(family: str) -> None:
    assert_same_curves(family, 4, OTHERS)


MATRIX: dict[int, dict[str, tuple[dict[str, int], int]]] = {
    2: {"ZeRO-2": ({"dp_shard": 2, "ep": 2}, 2), "ZeRO-3": ({"dp_shard": 2, "ep": 2}, 3), "tp 2": (TWO, 0)},
    4: {
        "ep 2, ZeRO-2": ({"dp_shard": 4, "ep": 2}, 2),
        "ep 4, ZeRO-2": ({"dp_shard": 4, "ep": 4}, 2),
        "ep 4, ZeRO-3": ({"dp_shard": 4, "ep": 4}, 3),
        "tp 2, ep 2, ZeRO-3": (FOUR, 3),
        "tp 2, ep 4, ZeRO-2": (WIDER, 2),
        "pp 2, ep 2, ZeRO-2": ({"pp": 2, "dp_shard": 2, "ep": 2}, 2),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_in_every_layout_and_number_of_micro_batches(family: str, world: int) -> None:
    plans = {
        f"{name}, {microbatches} micro-batches": plan(mesh, zero, stream=False, microbatches=microbatches)
        for name, (mesh, zero) in MATRIX[world].items()
        for microbatches in (1, 4)
    }
    assert_same_curves(family, world, plans)


def state_after(
    rank: int, world: int, folder: str, tables: dict[str, Any], source: str, to: str
) -> tuple[dict[str, str], Curve]:
    """Digests of the state that is saved as `to`: after two steps, or as loaded from `source`. Then two more steps."""
    engine = build("mixtral", tables)
    if source:
        engine.load(Path(folder) / source)
    else:
        train_steps(engine, 2)
    engine.save(Path(folder) / to)
    found = {key: full_tensor(value, engine) for key, value in engine.state().items()}
    digests = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in found.items()}
    return digests, train_steps(engine, 2, first=2)


@pytest.mark.extended
def test_a_checkpoint_goes_to_one_rank_and_back(tmp_path: Path) -> None:
    chain = [(2, PLANS[2]["folded"]), (1, {}), (2, PLANS[2]["folded, sequence parallel"])]
    chain += [(4, PLANS[4]["width, sequence parallel, ZeRO-3"]), (4, PLANS[4]["folded, ep 4, ZeRO-3"])]
    found, source = [], ""
    for at, (world, tables) in enumerate(chain):
        found.append(run_ranks(state_after, world, str(tmp_path), tables, source, str(at), timeout_s=120.0)[0])
        source = str(at)
    digests, curve = found[0]
    for other_digests, other_curve in found[1:]:
        assert other_digests == digests
        assert [loss for loss, _ in other_curve] == pytest.approx([loss for loss, _ in curve], abs=SAME_CURVE_LOSS_ABS)
    require_exported(tmp_path / "4", tmp_path / "exported")


def require_exported(folder: Path, out: Path) -> None:
    """A checkpoint's weights are those of the Hugging Face model that loads its export."""
    from transformers import AutoModelForCausalLM

    newest = peek_newest(folder)
    assert newest is not None
    weights = dict(model_tensors(newest.path))
    [alone] = run_ranks(config_of, 1)
    export_folder(alone, weights.items(), out)
    loaded = AutoModelForCausalLM.from_pretrained(str(out)).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def config_of(rank: int, world: int) -> Any:
    return build("mixtral", {}).model.config


def coverage(rank: int, world: int, family: str, tables: dict[str, Any]) -> set[tuple[tuple[str, ...], ...]]:
    rows = [row for row in build(family, tables).coverage() if ".experts." in row.name]
    dist.barrier()
    return {(row.sharded_axes, row.replicated_axes) for row in rows}


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    by_default(
        [("mixtral", "width, ZeRO-2", (("edp", "ep", "tp"), ()))],
        [
            ("mixtral", "width, ZeRO-2", (("edp", "ep", "tp"), ())),
            ("gpt_oss", "width, ZeRO-2", (("edp", "ep"), ("tp",))),
            ("mixtral", "folded, ep 4, ZeRO-3", (("edp", "ep"), ())),
            ("mixtral", "replicas of experts inside tp", (("ep",), ("edp",))),
        ],
    ),
)
def test_coverage_names_the_axes_of_experts(family: str, name: str, expected: tuple[tuple[str, ...], ...]) -> None:
    for found in run_ranks(coverage, 4, family, {**PLANS[4], **OTHERS}[name]):
        assert found == {expected}


def low_precision(rank: int, world: int, plans: list[dict[str, Any]]) -> list[tuple[Curve, float, set[str]]]:
    """Curve, loss of an evaluation, and dtypes that are not those of the plan."""
    found = []
    for tables in plans:
        with build("deepseek_v3", {**tables, "precision": {"preset": "bf16"}}) as engine:
            curve = train_steps(engine, STEPS)
            evaluation = engine.evaluate(engine.share_of(global_batch(STEPS)))
            found.append((curve, evaluation.loss, {str(row) for row in engine.dtypes() if not row.ok}))
    return found


@pytest.mark.slow
def test_bfloat16_stays_near_one_process() -> None:
    [(expected, evaluated, _)] = run_ranks(low_precision, 1, [{}])[0]
    for curve, loss, wrong in run_ranks(low_precision, 2, list(PLANS[2].values()), timeout_s=120.0)[0]:
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in expected], abs=BF16_LOSS_ABS)
        assert loss == pytest.approx(evaluated, abs=BF16_LOSS_ABS)
        assert wrong == set()
