"""`weft verify` on a real GPU: one rank, every precision, structurally different families. Run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tiny import FAMILIES

pytestmark = pytest.mark.gpu

FP32, EAGER = {"precision": {"preset": "fp32"}}, {"compile": {"enabled": False}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "what a GPU takes by itself": ("llama", {}),
    "the same with experts": ("mixtral", {"pipeline": {"microbatches": 2}}),
    "the same, tied, ZeRO-3": ("qwen3-tied", {"data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}}),
    "the same with float8": ("llama", {"data_parallel": {"zero": 2}, "float8": {"linears": "all"}}),
    "fp32": ("llama", {**FP32, **EAGER}),
    "fp32 ZeRO-3, tied": ("qwen3-tied", {**FP32, **EAGER, "data_parallel": {"zero": 3}}),
    "bf16": ("llama", {**EAGER, "pipeline": {"microbatches": 2}}),
    "bf16 ZeRO-3": ("llama", {**EAGER, "data_parallel": {"zero": 3}}),
    "bf16 ZeRO-2, experts": ("mixtral", {**EAGER, "data_parallel": {"zero": 2}}),
    "rows in float8": ("llama", {"float8": {"linears": "all", "recipe": "rowwise"}}),
    "delayed float8": ("llama", {"float8": {"linears": "all", "recipe": "delayed"}}),
    "a residual stream in float32": ("llama", {"precision": {"residual": "float32"}}),
    "fp16": ("llama", {"precision": {"preset": "fp16"}}),
    "fp32, dropout": ("gpt2", {**FP32, "pipeline": {"microbatches": 2}}),
}


ADAPTER = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj", "*.mlp.*"]}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_proved_on_the_gpu(case: str, tmp_path: Path) -> None:
    family, plan = CASES[case]
    require_proof(family, plan, {}, tmp_path)


@pytest.mark.parametrize("base", ["model", "bfloat16", "int8", "nf4"])
def test_an_adapter_is_proved_on_the_gpu(base: str, tmp_path: Path) -> None:
    require_proof("llama", {"precision": {"preset": "bf16"}}, {"adapter": {**ADAPTER, "base": base}}, tmp_path)


def require_proof(family: str, plan: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    run = {
        **more,
        "model": FAMILIES[family].model_dump(exclude_none=True),
        "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 32},
        "train": {"steps": 20, "global_batch": 8, "learning_rate": 1e-3, "warmup_steps": 2, "seed": 1},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan))
    command = [sys.executable, "-m", "weft", "verify", "run.toml", "--plan", "plan.toml", "--json"]
    done = subprocess.run(
        [*command, "--device", "cuda"], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.stdout, done.stderr[-2000:]
    verdict = json.loads(done.stdout)
    assert verdict.get("ok"), [c for c in verdict.get("checks", [verdict]) if not c.get("ok")]
