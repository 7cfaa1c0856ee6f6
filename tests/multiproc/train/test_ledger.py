"""The ledger of real ranks: traffic as the planner counts it, memory within its bounds, the switches, out of memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default
from tiny_run import run_tables, train_here, weft_command, write_run

from weft.core.errors import MemoryLimitError
from weft.core.run_spec import RunSpec
from weft.launch.local import launch
from weft.train.job import Job

WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"type": "llama", "config": {**WIDE, "num_key_value_heads": 2}}
TIED = {"type": "qwen3", "config": {**WIDE, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}}
OPT = {
    "type": "opt",
    "config": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 65, "word_embed_proj_dim": 32, "dropout": 0.0,
    },
}  # fmt: skip
SHORT = {"train.steps": 3, "evaluation.every": 0, "checkpoint.at_end": False, "logging.tensorboard": False}
SHARDED = {"mesh": {"dp_shard": 2}, "pipeline": {"microbatches": 2}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DDP": (LLAMA, {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}}),
    "ZeRO-1": (TIED, {**SHARDED, "data_parallel": {"zero": 1}}),
    "ZeRO-2": (LLAMA, {**SHARDED, "data_parallel": {"zero": 2}}),
    "ZeRO-3": (TIED, {**SHARDED, "data_parallel": {"zero": 3}}),
    "bf16": (LLAMA, {**SHARDED, "data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}),
}
HSDP = {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}
PAIRS = {
    f"pairs, {name}": (LLAMA, {"mesh": {"cp": 4}, "context_parallel": {"attention": name, "ulysses": 2}})
    for name in ("ring", "gather")
}
DDP_X3 = {"mesh": {"dp_replicate": 3}}
# Nothing divides by three: a table of 65 + 2 positions, norms of 32 numbers and their biases.
ZERO3_X3 = {"mesh": {"dp_shard": 3}, "data_parallel": {"zero": 3}}
FEW = ("DDP", "ZeRO-3")
TOGETHER: list[tuple[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]]] = [
    (2, {name: CASES[name] for name in FEW}),
    (2, {name: case for name, case in CASES.items() if name not in FEW}),
    (3, {"DDP of three": (LLAMA, DDP_X3), "uneven": (OPT, ZERO3_X3)}),
    (4, {"HSDP": (LLAMA, HSDP), **PAIRS}),
]
ALL = [name for _, cases in TOGETHER for name in cases]


def run_all(
    rank: int, world: int, cache: str, folder: str, corpus: str, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    for name, (model, plan) in cases.items():
        settings = {**SHORT, "model": model, "train.global_batch": 12}
        train_here(Path(folder, name), Path(corpus), settings, plan=plan)


def ledgers(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/ledger.json")}


class Measured:
    """The ledgers of all cases; those that are measured together are trained when the first of them is asked for."""

    def __init__(self, corpus: Path, cache: Path, folder: Path) -> None:
        self._places, self._folder = (str(cache), str(folder), str(corpus)), folder

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in ledgers(self._folder):
            ranks, cases = next((ranks, cases) for ranks, cases in TOGETHER if name in cases)
            run_ranks(run_all, ranks, *self._places, cases, timeout_s=240)
        return ledgers(self._folder)[name]


@pytest.fixture(scope="module")
def measured(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(corpus, cache, tmp_path_factory.mktemp("measured"))


@pytest.mark.parametrize("name", by_default(FEW, ALL, extended=ALL))
def test_traffic_is_what_the_planner_said_to_the_byte(name: str, measured: Measured) -> None:
    ledger = measured[name]
    assert ledger["warnings"] == []
    assert ledger["remarks"] == []
    rows = ledger["traffic"]
    assert rows
    assert [row["predicted"] for row in rows] == [row["measured"] for row in rows]
    assert all(row["error"] == 0 and row["count"] > 0 for row in rows)


@pytest.mark.parametrize("name", by_default(FEW, [*CASES, "HSDP"], extended=[*CASES, "HSDP"]))
def test_memory_terms_are_those_of_the_peak(name: str, measured: Measured) -> None:
    memory = measured[name]["memory"]
    assert sum(row["measured"] or 0 for row in memory["terms"].values()) == memory["total"]["measured"]
    assert abs(memory["total"]["error"]) < 0.15  # of a model so small, rounding to 512 bytes is part of it
    assert {"weights", "optimizer_state", "activations"} <= memory["terms"].keys()
    fullest = max(memory["ranks"], key=lambda rank: rank["step_peak_bytes"])
    assert fullest["step_peak_bytes"] == memory["total"]["measured"] < fullest["peak_bytes"]
    assert memory["peak_at"]["measured"]["phase"] in ("forward", "backward", "update")


def test_forward_and_backward_are_told_apart_and_collectives_timed(measured: Measured) -> None:
    time = measured["ZeRO-3"]["time"]
    seconds = {term: row["measured"] for term, row in time["terms"].items()}
    assert seconds["forward"] > 0
    assert seconds["backward"] > 0
    assert seconds["forward"] + seconds["backward"] == pytest.approx(seconds["forward_backward"])
    assert {row["collective"] for row in time["collectives"]} >= {"all_gather"}
    assert all(row["measured"] > 0 for row in time["collectives"])


def test_the_switch_leaves_the_columns_out(corpus: Path, cache: Path, tmp_path: Path) -> None:
    ledger = train_here(tmp_path / "off", corpus, {**SHORT, "ledger.measure": False})
    assert (ledger["flops"], ledger["memory"]["total"]["measured"], ledger["warnings"]) == (None, None, [])
    assert ledger["memory"]["terms"]["weights"]["measured"] == ledger["memory"]["terms"]["weights"]["predicted"]
    assert ledger["memory"]["peak_at"]["measured"] is None


@pytest.mark.slow
def test_the_dry_run_joins_the_ledger(corpus: Path, cache: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run.toml", corpus, {**SHORT, "model": LLAMA, "ledger.dry_run": True})
    zero = ("--nproc", "2", "--set", "data_parallel.zero=3", "--json")
    done = weft_command("train", "run.toml", *zero, "--out", "run", cwd=tmp_path, cache=cache)
    assert done.returncode == 0, done.stderr
    ledger = json.loads(done.stdout)
    assert ledger["remarks"] == []
    assert ledger["dry_run"]["rank"] == 0
    assert [row["dry_run"] for row in ledger["traffic"]] == [row["measured"] for row in ledger["traffic"]]
    assert abs(ledger["memory"]["total"]["dry_run_error"]) < 0.01
    assert "dry-run" in done.stderr
    assert "dry run" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


RANK_MAIN = """
import os, sys
import torch
if os.environ["RANK"] == "1":
    calls, original = [], torch.nn.functional.silu
    def silu(*given, **more):
        calls.append(1)
        if len(calls) == {calls}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*given, **more)
    torch.nn.functional.silu = silu
from weft.train.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("calls", "step"), by_default([], [(2, 1), (11, 4)], extended=[(2, 1)]), ids=["measuring", "not measuring"]
)
def test_out_of_memory_is_one_sentence_of_the_rank(
    calls: int, step: int, corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks: the second call is in block 1 of step 1, the eleventh in block 1 of step 4."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    run = RunSpec.from_tables(run_tables(corpus, {**SHORT, "train.steps": 9, "model": LLAMA}))
    job = Job.create(run=run, plan_tables=CASES["ZeRO-3"][1] | {"pipeline": {}}, out=tmp_path / "run", device="cpu")
    (tmp_path / "job.json").write_text(job.to_json(), encoding="utf-8")
    (tmp_path / "rank.py").write_text(RANK_MAIN.replace("{calls}", str(calls)), encoding="utf-8")
    with pytest.raises(MemoryLimitError) as caught:
        launch(
            [sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "job.json")], num_ranks=2, scratch=tmp_path / "s"
        )
    told = caught.value
    assert (told.code, told.exit_code) == ("W703", 3)
    where = f"rank 1 ran out of memory in step {step}, forward of model.layers.1.mlp"
    assert told.message.startswith(where)
    assert "2.0 GiB were requested; the device has " in told.message
    assert "it held " in told.message
    assert told.hint
