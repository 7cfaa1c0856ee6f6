"""Distillation: the loss is the formula's, a run reads its teacher from a folder, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import build_engine, global_batch
from tiny_run import call_weft, metrics, run_tables, train_here, write_corpus, write_run
from transformers import LlamaConfig, LlamaForCausalLM

from weft.core.errors import BadValueError, ModelError, NotBuiltError
from weft.core.objective_spec import ObjectiveSpec
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.vocabulary import BYTE_VOCABULARY, padded
from weft.engine.distillation import Distillation
from weft.plan.legality import require_legal

FORMULA_ABS = 1e-6


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", num_documents=12)


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    return write_teacher(tmp_path / "teacher", vocab_size=padded(BYTE_VOCABULARY))


def write_teacher(folder: Path, *, vocab_size: int) -> str:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # sure of its answers, so that a student has something to learn
    model.save_pretrained(folder)
    return str(folder)


def settings(teacher: str, **keys: Any) -> dict[str, Any]:
    objective = {"kind": "distillation", "teacher": teacher, "alpha": 1.0, **keys}
    return {"objective": objective, "train.steps": 8, "evaluation.every": 0, "logging.tensorboard": False}


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    spec = ObjectiveSpec(kind="distillation", teacher="x", temperature=2.0, alpha=0.3)
    other = build_engine("qwen3-tied", seed=7).model.eval().requires_grad_(requires_grad=False)
    plan = {"pipeline": {"microbatches": 4}}
    engine = build_engine("qwen3-tied", plan, objective=Distillation(spec, other), clip_norm=0.0)
    plain, batch = build_engine("qwen3-tied").model, global_batch(0)
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda values: found.update({key: value.clone() for key, value in values.items()})
    record = engine.step(batch)
    at = batch["labels"] != -100
    own, wanted = (model(input_ids=batch["input_ids"], use_cache=False).logits[at].double() for model in (plain, other))
    divergence = F.kl_div((own / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean")
    loss = 0.3 * 4 * divergence + 0.7 * F.cross_entropy(own, batch["labels"][at])
    loss.backward()  # type: ignore[no-untyped-call]
    assert record.loss == pytest.approx(loss.item(), rel=FORMULA_ABS)
    assert record.figures is not None
    assert record.figures["divergence"] == pytest.approx(divergence.item(), rel=1e-5)
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[key], parameter.grad, atol=FORMULA_ABS, rtol=1e-4)


def test_a_run_comes_closer_to_its_teacher(tmp_path: Path, corpus: Path, teacher: str) -> None:
    train_here(tmp_path / "run", corpus, settings(teacher))
    found = [line["figures"]["divergence"] for line in metrics(tmp_path / "run")]
    assert found[-1] < 0.95 * found[0]


def test_a_teacher_of_another_vocabulary_is_named(tmp_path: Path, corpus: Path) -> None:
    other = write_teacher(tmp_path / "other", vocab_size=99)
    with pytest.raises(ModelError, match="has a vocabulary of 99, and the trained model one of"):
        train_here(tmp_path / "run", corpus, settings(other))


@pytest.mark.parametrize("tables", [{"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}, {"mesh": {"cp": 2}}])
def test_layouts_that_are_not_built_are_named(tables: dict[str, Any], corpus: Path, teacher: str) -> None:
    run = RunSpec.from_tables(run_tables(corpus, settings(teacher)))
    with pytest.raises(NotBuiltError, match=r"'distillation' with (mesh|tensor_parallel.loss_parallel)"):
        require_legal(Plan.from_tables(tables), run)


def test_tensor_parallelism_with_whole_rows_of_logits_is_legal(corpus: Path, teacher: str) -> None:
    run = RunSpec.from_tables(run_tables(corpus, settings(teacher)))
    require_legal(Plan.from_tables({"mesh": {"tp": 2}, "tensor_parallel": {"loss_parallel": False}}), run)


def test_a_teacher_is_needed(corpus: Path) -> None:
    with pytest.raises(BadValueError, match="needs teacher"):
        RunSpec.from_tables(run_tables(corpus, {"objective": {"kind": "distillation"}}))


@pytest.mark.extended
def test_verify_knows_it(tmp_path: Path, corpus: Path, teacher: str) -> None:
    code, out, said = call_weft("verify", write_run(tmp_path / "run.toml", corpus, settings(teacher)))
    assert (code, "FAIL" in out) == (0, False), out + said
