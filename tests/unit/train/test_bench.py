"""`weft bench step`: figures of one rank, alone or of many, beside a plain loop; a CPU tells no kernels."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from weft.cli.main import app
from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.bench import Bench, measure_engine, measure_plain
from weft.train.kernel_classes import class_of

MODEL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def bench_of(plan: dict[str, Any], *, family: str = "llama", **config: int) -> Bench:
    layout = Plan.from_tables(plan)
    tables = {
        "model": {"type": family, "config": {**MODEL, **config}},
        "data": {"sequence_length": 16},
        "train": {"global_batch": 2 * layout.mesh.dp_degree},
    }
    return Bench(run=RunSpec.from_tables(tables), plan=layout, device=torch.device("cpu"), steps=3, warmup=1)


@pytest.mark.parametrize("plan", [{}, {"mesh": {"dp_shard": 8}}, {"mesh": {"dp_replicate": 4}}])
def test_a_rank_of_any_number_is_measured_alone(plan: dict[str, Any]) -> None:
    bench = bench_of(plan)
    timed, techniques, notes = measure_engine(bench)
    assert timed.tokens_per_s == pytest.approx(bench.tokens / timed.step_s)
    assert bench.tokens == 32
    assert len(timed.steps_s) == 3
    assert 3.0 < timed.loss_first < 5.5, "random tokens of 64: log 64 is 4.2"
    assert [row.technique for row in techniques][:2] == ["compiled blocks", "fused head and loss"]
    assert notes == ()
    assert not dist.is_initialized() or dist.get_world_size() == 1, "the world that was not there is gone"


@pytest.mark.parametrize("dispatcher", ["pairs", "tokens", "gather"])
def test_a_rank_of_experts_gets_as_many_rows_as_it_sends(dispatcher: str) -> None:
    plan = {"mesh": {"dp_shard": 8, "ep": 4}, "expert_parallel": {"dispatcher": dispatcher}}
    timed, *_ = measure_engine(bench_of(plan, family="qwen3_moe", **EXPERTS))
    assert 3.0 < timed.loss_first < 5.5
    assert timed.loss_last != timed.loss_first


@pytest.mark.parametrize(("attention", "size"), [("gather", 1), ("ring", 1), ("ulysses", 1), ("ring", 2)])
def test_a_rank_of_a_context_has_a_part_of_each_row(attention: str, size: int) -> None:
    policy = {"attention": attention, "ulysses": size}
    bench = bench_of({"mesh": {"dp_shard": 2, "cp": 4}, "context_parallel": policy})
    timed, *_ = measure_engine(bench)
    assert bench.tokens == 2 * 16 / 4
    assert 3.0 < 4 * timed.loss_first < 5.5, "the loss of a part of the row is its part of the mean"
    assert timed.loss_last != timed.loss_first


def test_a_rank_with_less_work_than_others_is_refused() -> None:
    with pytest.raises(NotBuiltError, match="the least attention"):
        measure_engine(bench_of({"mesh": {"cp": 2}, "context_parallel": {"split": "contiguous"}}))


def test_a_plain_loop_has_no_context() -> None:
    assert measure_plain(bench_of({"mesh": {"cp": 2}})).failed == "has no context parallelism"


def test_the_plain_loop_has_the_same_rows() -> None:
    plain = measure_plain(bench_of({"mesh": {"dp_shard": 8}}))
    assert plain.tokens_per_s > 0
    assert not plain.failed


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_ranks_that_wait_for_each_other_are_refused(axis: str) -> None:
    with pytest.raises(NotBuiltError, match="depend on each other"):
        measure_engine(bench_of({"mesh": {axis: 2}}))


def _chatty_plain(bench: Bench) -> Any:
    warnings.warn("a library's remark", stacklevel=1)
    return measure_plain(bench)


def test_the_verb_prints_json_and_writes_the_dated_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.train.bench.measure_plain", _chatty_plain)  # would end the test if it were let through
    run = tmp_path / "run.toml"
    config = ", ".join(f"{key} = {value}" for key, value in MODEL.items())
    run.write_text(
        f'[model]\ntype = "llama"\nconfig = {{ {config} }}\n[data]\nsequence_length = 16\n[train]\nglobal_batch = 8\n'
    )
    page = tmp_path / "results" / "step.md"
    options = ["--set", "mesh.dp_shard=4", "--steps", "2", "--warmup", "1", "--out", str(page), "--json"]
    result = CliRunner().invoke(app, ["bench", "step", str(run), *options, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    assert answer["plan"]["mesh"]["dp_shard"] == 4
    assert answer["plain"]["tokens_per_s"] > 0
    text = page.read_text()
    assert "| weft | " in text
    assert "| plain HF | " in text
    assert "| compiled blocks | no | compile.enabled is false |" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("triton_poi_fused_mul_silu_4", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("_rows", "loss"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>", "copies"),
        ("something_new", "other"),
    ],
)
def test_kernels_by_class(name: str, kind: str) -> None:
    assert class_of(name) == kind
