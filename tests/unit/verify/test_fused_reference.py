"""The reference of a fused loss divides by the tokens last, as that does: in a fresh model it is the difference between
a right gradient and one that seems 0.2% too large. And one that is 0.3% too large is seen."""

from __future__ import annotations

import pytest
from tiny import FAMILIES

import weft.engine.head_loss as head_loss
from weft.core.run_spec import RunSpec
from weft.verify.request import Request
from weft.verify.verdict import Verdict
from weft.verify.worker import run_request


def verified(family: str, seed: int) -> Verdict:
    run = {
        "model": FAMILIES[family].model_dump(exclude_none=True),
        "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 32},
        "train": {"steps": 20, "global_batch": 8, "learning_rate": 1e-3, "warmup_steps": 2, "seed": seed},
    }
    plan = {"precision": {"preset": "bf16"}, "pipeline": {"microbatches": 2}, "kernels": {"loss": "fused"}}
    return run_request(Request(run=RunSpec.from_tables(run), plans=[plan], steps=2))[0]


def test_a_right_gradient_does_not_seem_too_large() -> None:
    """Of twelve seeds the one whose labels' gradients round furthest from a 240th of them: divided first it fails."""
    verdict = verified("qwen3-tied", seed=7)
    assert verdict.ok, [check for check in verdict.checks if not check.ok]


def test_a_scale_rounded_to_the_gradients_format_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU once did: every gradient behind the loss a third of a percent too large; no other check sees it."""
    right = head_loss._scaled
    monkeypatch.setattr(head_loss, "_scaled", lambda gradient, scale, dtype: right(gradient, scale.bfloat16(), dtype))
    wrong = [check for check in verified("llama", seed=2).checks if not check.ok]
    assert [check.name for check in wrong] == ["same precision"]
    assert "gradient norm" in str(wrong[0])
