"""A reward model: its loss is Bradley and Terry's over the scores of last tokens; its export scores the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import pair_settings, write_pairs
from tiny import FAMILIES, build_engine
from tiny_run import metrics, run_tables, train_here

from weft.core.errors import ModelError, NotBuiltError
from weft.core.objective_spec import ObjectiveSpec
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec, RunSpec
from weft.engine.preference import objective_of
from weft.generate.load import exported
from weft.models.build import build_config
from weft.models.drawn_head import WithDrawnHead
from weft.plan.ask import estimate_plan
from weft.plan.legality import require_legal
from weft.train.build import base_weights
from weft.train.export import export_run
from weft.train.trained_tensors import checkpoint_of, saved_tensors

LENGTH = 12


def scalar(family: str) -> ModelSpec:
    return FAMILIES[family].model_copy(update={"head": "scalar"})


def pairs_of(step: int, *, pairs: int = 4) -> dict[str, torch.Tensor]:
    """Pairs of uneven answers, the last one a filler."""
    tokens = torch.randint(1, 256, (2 * pairs, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    for row in range(2 * pairs):
        labels[row, :2], labels[row, 5 + row % 8 :] = -100, -100
    labels[-2:] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def written_out(model: Any, batch: dict[str, torch.Tensor], center: float) -> torch.Tensor:
    """TRL's RewardTrainer on one row at a time, cut after its last token."""
    losses = []
    for pair in range(3):
        rewards = []
        for row in (2 * pair, 2 * pair + 1):
            last = int((batch["labels"][row] != -100).nonzero()[-1]) + 1
            ids = batch["input_ids"][row : row + 1, : last + 1]
            rewards.append(model(input_ids=ids, use_cache=False).logits[0, -1, 0])
        chosen, rejected = rewards
        losses.append(-F.logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2"])
@pytest.mark.parametrize("center", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_the_formula(family: str, center: float) -> None:
    model_spec = scalar(family)
    if family == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model_spec = model_spec.model_copy(update={"config": {**model_spec.config, **off}})
    objective = objective_of(ObjectiveSpec(kind="reward", center=center))
    found: dict[str, torch.Tensor] = {}
    with build_engine(model_spec, {"pipeline": {"microbatches": 2}}, objective=objective) as engine:
        loss = written_out(engine.model, pairs_of(0), center)
        loss.backward()  # type: ignore[no-untyped-call]
        expected = {
            name: value.grad.clone() for name, value in engine.model.named_parameters() if value.grad is not None
        }
        engine.model.zero_grad()
        engine.on_gradients = lambda gradients: found.update({key: one.clone() for key, one in gradients.items()})
        record = engine.step(pairs_of(0))
    assert record.loss == pytest.approx(loss.item(), abs=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def settings(**objective: Any) -> dict[str, Any]:
    return {**pair_settings(**objective), "objective": {"kind": "reward", **objective}}


def test_an_exported_classifier_has_the_scores_of_the_run(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    pairs = write_pairs(tmp_path / "pairs.jsonl")
    train_here(tmp_path / "run", pairs, settings())
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["figures"]["reward_margin"] > 0
    export_run(tmp_path / "run", tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out"))
    assert loaded.config.num_labels == 1
    assert loaded.score.weight.shape[0] == 1
    saved = dict(saved_tensors(checkpoint_of(tmp_path / "run", step=None).path))
    assert torch.equal(loaded.score.weight, saved["lm_head.weight"])
    assert torch.equal(loaded.model.norm.weight, saved["model.norm.weight"])
    with pytest.raises(ModelError, match="writes no text"), exported(tmp_path / "run", step=None, dtype=torch.float32):
        pass


def test_pretrained_weights_get_a_drawn_head(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = build_config(FAMILIES["qwen3-tied"], vocab_size=257)
    stored = AutoModelForCausalLM.from_config(config)
    stored.save_pretrained(tmp_path / "base")
    run = RunSpec.from_tables(
        run_tables(write_pairs(tmp_path / "pairs.jsonl"), {**settings(), "model": {"path": str(tmp_path / "base")}})
    )
    source, _ = base_weights(run, build_config(run.model, vocab_size=1), device=torch.device("cpu"))
    assert isinstance(source, WithDrawnHead)
    found = {name: read((slice(None),)) for name, read in source.readers(["lm_head.weight", "model.norm.weight"])}
    assert found["lm_head.weight"].shape == (1, 32)
    assert found["lm_head.weight"].std() > 0
    assert torch.equal(found["model.norm.weight"], stored.model.norm.weight)


def test_what_a_scalar_head_cannot_do_is_refused(tmp_path: Path) -> None:
    run = RunSpec.from_tables(run_tables(write_pairs(tmp_path / "pairs.jsonl"), settings()))
    with pytest.raises(NotBuiltError, match="no vocabulary to shard"):
        require_legal(Plan.from_tables({"mesh": {"tp": 2}}), run)
    with pytest.raises(NotBuiltError, match=r"mesh.tp = 2"):
        estimate_plan(run, Plan.from_tables({"mesh": {"tp": 2}}), "2xH100-80GB")
