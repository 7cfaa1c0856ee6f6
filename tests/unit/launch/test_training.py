"""`weft.train` with a caller's own model, objective, optimizer, data and callbacks; `Engine.export`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build_engine, train_steps
from transformers import AutoModelForCausalLM, LlamaConfig

import weft
from weft.core.errors import BadValueError, CheckpointError, ModelError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.objective import CausalLanguageModel
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.train.parts import OwnRows, TrainParts

CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
RUN = {
    "model": {"type": "llama", "config": CONFIG},
    "data": {"sequence_length": 16},
    "train": {"steps": 6, "global_batch": 4, "learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    "evaluation": {"every": 0},
    "logging": {"tensorboard": False},
    "ledger": {"measure": False, "dry_run": False},
}
ROWS = [{"input_ids": list(range(at, at + 16)), "labels": list(range(at + 1, at + 17))} for at in range(32)]


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


class Doubled(CausalLanguageModel):
    def loss_sum(self, model: Any, batch: Any) -> torch.Tensor:
        return 2 * super().loss_sum(model, batch)


def _model() -> Any:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **CONFIG))  # type: ignore[arg-type]


def _sgd(groups: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2)


def test_the_parts_are_what_trains(tmp_path: Path) -> None:
    """One step by hand, then the run stops where a callback says so, and resumes to its end."""
    seen: list[int] = []
    given: dict[str, Any] = {"model": _model, "objective": Doubled(), "optimizer": _sgd, "data": ROWS, "quiet": True}
    run = RunSpec.from_tables(RUN)
    ledger = weft.train(
        run, out=tmp_path / "run", callbacks=[lambda record: seen.append(record.step) or record.step == 2], **given
    )  # type: ignore[operator]
    assert ledger["run"]["status"] == "stopped"
    assert seen == [1, 2, 3]  # all ranks hear of a stop with the next step
    assert ledger["run_dir"] == str(tmp_path / "run")
    batch = OwnRows(ROWS, seed=0, global_batch=4, dp_rank=0, dp_degree=1, epochs=None).batch(0)
    model = _model()
    loss = 2 * torch.nn.functional.cross_entropy(
        model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()
    )
    assert _losses(tmp_path / "run")[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    resumed = weft.train(resume=tmp_path / "run", **given)
    assert resumed["run"]["status"] == "finished"
    straight = weft.train(run, out=tmp_path / "straight", **given)
    assert straight["run"]["steps"] == 6
    assert _losses(tmp_path / "run") == _losses(tmp_path / "straight")


def test_a_model_of_the_callers_own_is_not_judged_by_the_run(tmp_path: Path) -> None:
    run = RunSpec.from_tables({**RUN, "model": {"type": "gpt2", "config": {"n_positions": 8}}})
    with pytest.raises(ModelError, match="8 positions"):
        weft.train(run, out=tmp_path / "run", quiet=True)
    ledger = weft.train(run, out=tmp_path / "run", model=_model, data=ROWS, quiet=True)
    assert ledger["run"]["status"] == "finished"


def test_rows_are_the_same_on_any_number_of_ranks_and_end() -> None:
    share = {"seed": 1, "global_batch": 8, "epochs": 1}
    whole = OwnRows(ROWS[:12], dp_rank=0, dp_degree=1, **share)  # type: ignore[arg-type]
    parts = [OwnRows(ROWS[:12], dp_rank=rank, dp_degree=2, **share) for rank in range(2)]  # type: ignore[arg-type]
    for position in (0, 8):
        joined = torch.cat([part.batch(position)["labels"] for part in parts])
        assert torch.equal(joined, whole.batch(position)["labels"])
    first = torch.cat([whole.batch(0)["labels"], whole.batch(8)["labels"][:4]])
    assert sorted(row[0] for row in first.tolist()) == [row["labels"][0] for row in ROWS[:12]]
    assert (whole.batch(8)["labels"][4:] == -100).all()
    assert not whole.has_batch(16)
    with pytest.raises(BadValueError, match="no rows"):
        OwnRows([], dp_rank=0, dp_degree=1, **share)  # type: ignore[arg-type]


SCRIPT = """
import torch, weft

class Doubled:
    def weight(self, batch):
        return (batch["labels"] != -100).sum()
    def loss_sum(self, model, batch):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1)
        return 2 * torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")

if __name__ == "__main__":
    for nproc in (1, 2):
        run, sgd = weft.RunSpec.from_file("run.toml"), lambda groups: torch.optim.SGD(groups, lr=0.1)
        weft.train(run, objective=Doubled(), optimizer=sgd, nproc=nproc, out=f"ranks-{nproc}", quiet=True)
"""


def test_functions_of_a_script_reach_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RunSpec.from_tables({**RUN, "train": {**RUN["train"], "steps": 2}}).to_toml())  # type: ignore[dict-item]
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    one, two = _losses(tmp_path / "ranks-1"), _losses(tmp_path / "ranks-2")
    assert two == pytest.approx(one, rel=1e-5)
    assert one[0] > 10  # twice the cross entropy of a fresh model


def test_what_cannot_be_sent_is_said(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    with (tmp_path / "file").open("w") as file, pytest.raises(BadValueError, match="cannot be sent to the ranks"):
        TrainParts(data=[{"input_ids": file}]).write(tmp_path / "parts")
    TrainParts(data=ROWS).write(tmp_path / "parts")
    assert TrainParts.read(tmp_path / "parts").data == ROWS
    assert TrainParts.read(tmp_path / "none").is_empty


def test_an_engine_exports_its_weights_and_their_average(tmp_path: Path) -> None:
    engine = build_engine("llama", optimizer=OptimizerPolicy(learning_rate=1e-2, ema_decay=0.9))
    with pytest.raises(CheckpointError, match="no average"):
        engine.export(tmp_path / "early", ema=True)
    train_steps(engine, 2)
    name = "model.layers.0.mlp.down_proj.weight"
    weight = dict(engine.model.named_parameters())[name]
    for out, right in (("last", weight), ("average", engine.optimizer.state[weight]["ema"])):
        engine.export(tmp_path / out, ema=out == "average")
        loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / out))
        assert torch.equal(dict(loaded.named_parameters())[name], right)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["average", "last"]
    assert Plan() == engine.plan
