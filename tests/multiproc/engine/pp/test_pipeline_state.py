"""What a pipeline saves loads on any other layout, and the other way round: the same names, the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from torch import nn

from weft.engine.engine import Engine

PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}
TWO_STAGES_A_RANK = {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "microbatches": 2, "virtual_stages": 2}}


def digests(engine: Engine) -> dict[str, str]:
    """Of every parameter that is here, copies of tied ones too, by its first name and its own."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        bits = hashlib.sha256(parameter.detach().contiguous().numpy().tobytes()).hexdigest()
        found[f"{engine.layout.copies.get(name, name)} as {name}"] = bits
        found[f"{name} moment"] = _moment(engine, parameter)
    return found


def _moment(engine: Engine, parameter: nn.Parameter) -> str:
    return hashlib.sha256(engine.optimizer.state[parameter]["exp_avg"].numpy().tobytes()).hexdigest()


def train_and_save(rank: int, world: int, plan: dict[str, Any], folder: str) -> dict[str, str]:
    engine = build_engine("qwen3-four", plan)
    train_steps(engine, 2)
    engine.save(folder)
    return digests(engine)


def load(rank: int, world: int, plan: dict[str, Any], folder: str) -> dict[str, str]:
    engine = build_engine("qwen3-four", plan, seed=1)
    engine.load(folder)
    return digests(engine)


def by_name(of_ranks: list[dict[str, str]]) -> dict[str, str]:
    """First name (or a moment's) to bits; copies must agree."""
    found: dict[str, str] = {}
    for key, bits in (item for one in of_ranks for item in one.items()):
        name = key.partition(" as ")[0].replace("lm_head.weight moment", "model.embed_tokens.weight moment")
        assert found.setdefault(name, bits) == bits, key
    return found


@pytest.mark.parametrize(
    "plan", [pytest.param({}, id="one rank"), pytest.param(TWO_STAGES_A_RANK, id="a V", marks=pytest.mark.slow)]
)
def test_a_pipeline_s_checkpoint_loads_elsewhere(plan: dict[str, Any], tmp_path: Path) -> None:
    saved = by_name(run_ranks(train_and_save, 2, PIPELINE, str(tmp_path)))
    assert by_name(run_ranks(load, 2 if plan else 1, plan, str(tmp_path))) == saved


def test_a_pipeline_loads_what_one_rank_saved(tmp_path: Path) -> None:
    saved = by_name(run_ranks(train_and_save, 1, {}, str(tmp_path)))
    found = run_ranks(load, 2, PIPELINE, str(tmp_path))
    assert "model.embed_tokens.weight as lm_head.weight" in found[1]  # the head has its copy
    assert by_name(found) == saved
