"""Runs with schedule-free AdamW: evaluations and exports are of the average, a resume has the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import curve, run_tables, stop_after, train_here, write_corpus

from weft.core.errors import WeftError
from weft.core.run_spec import RunSpec
from weft.train.export import export_run
from weft.train.trained_tensors import checkpoint_of, saved_tensors

SETTINGS: dict[str, Any] = {
    "train.optimizer": "schedule_free",
    "train.schedule": "constant",
    "train.steps": 6,
    "logging.tensorboard": False,
}


def test_an_export_holds_the_average_and_a_resume_continues(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    corpus = write_corpus(tmp_path / "corpus")
    train_here(tmp_path / "straight", corpus, SETTINGS)
    with stop_after(3):
        train_here(tmp_path / "halves", corpus, SETTINGS)
    train_here(tmp_path / "halves", corpus, SETTINGS, resume=True)
    assert curve(tmp_path / "halves") == curve(tmp_path / "straight")
    export_run(tmp_path / "straight", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    path = checkpoint_of(tmp_path / "straight", step=None).path
    trained = dict(saved_tensors(path))
    average = dict(saved_tensors(path, run=RunSpec.from_file(tmp_path / "straight" / "run.toml")))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(exported[name], average[name])
    assert not torch.equal(average[name], trained[name])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [({"train.schedule": "cosine"}, "needs train.schedule = 'constant'"), ({"train.ema_decay": 0.9}, "ema_decay")],
)
def test_a_second_average_or_schedule_is_refused(more: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=sentence):
        RunSpec.from_tables(run_tables(tmp_path, {**SETTINGS, **more}))
