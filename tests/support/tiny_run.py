"""Tiny training runs as a user makes them: a text corpus, a run.toml, `weft` as a command, and what a run left behind.

For tests only. A run is given by dotted settings ("train.steps": 6) over TINY_RUN; `train_here` runs it in this
process (one rank, or the rank of a Gloo group that exists already), `weft_command` starts the real command.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

if TYPE_CHECKING:
    from weft.engine.pending import PendingStep

TINY_RUN: dict[str, dict[str, Any]] = {
    "model": {
        "type": "llama",
        "config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    },
    "data": {"tokenizer": "bytes", "sequence_length": 32, "eval_fraction": 0.1},
    "train": {"steps": 12, "global_batch": 8, "learning_rate": 1e-2, "warmup_steps": 2, "seed": 3},
    "evaluation": {"every": 5, "batches": 1},
    "checkpoint": {"every": 0, "keep": 10},
    "logging": {"every": 1},
    "ledger": {"dry_run": False},  # half a dozen seconds of a core each; tests that want one say so
}
GPT2 = {"type": "gpt2", "config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}}
PATIENCE_S = 120
_WORDS = ("warp", "weft", "loom", "shuttle", "thread", "cloth", "heddle", "reed", "twill", "satin", "selvage", "shed")

Settings = dict[str, Any]


def write_corpus(folder: Path, *, num_documents: int = 40, longest: int = 120) -> Path:
    """A folder of short texts, one document each, the same every time."""
    folder.mkdir(parents=True)
    draw = random.Random(7)
    for number in range(num_documents):
        words = draw.choices(_WORDS, k=draw.randint(longest // 6, longest))
        (folder / f"{number:03d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    return folder


def run_tables(corpus: Path, settings: Settings | None = None) -> dict[str, dict[str, Any]]:
    """The tables of run.toml. A setting of one word ("model") replaces the whole section."""
    tables = {name: dict(section) for name, section in TINY_RUN.items()}
    tables["data"]["source"] = str(corpus)
    for path, value in (settings or {}).items():
        section, _, key = path.partition(".")
        if key:
            tables[section][key] = value
        else:
            tables[section] = value
    return tables


def write_run(path: Path, corpus: Path, settings: Settings | None = None) -> Path:
    """run.toml as a file."""
    path.write_text(tomli_w.dumps(run_tables(corpus, settings)), encoding="utf-8")
    return path


def train_here(
    out: Path,
    corpus: Path,
    settings: Settings | None = None,
    *,
    plan: Settings | None = None,
    resume: bool = False,
    may_change: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Train in this process; returns the ledger."""
    from weft.core.run_spec import RunSpec
    from weft.train.job import Job
    from weft.train.worker import run_job

    run = RunSpec.from_tables(run_tables(corpus, settings))
    options: dict[str, Any] = {"resume": resume, "may_change": may_change, "device": "cpu"}
    return run_job(Job.create(run=run, plan_tables=plan or {}, out=out, **options))


@contextmanager
def stop_after(step: int) -> Iterator[None]:
    """Inside, a run in this process stops after `step` as a signal would make it, its schedule unchanged."""
    from weft.train.loop import TrainingLoop

    original = TrainingLoop._finish_step

    def finish(loop: TrainingLoop, pending: PendingStep) -> bool:
        return original(loop, pending) or pending.step >= step

    TrainingLoop._finish_step = finish  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingLoop._finish_step = original  # type: ignore[method-assign]


def rewind(run: Path, copy: Path, *, step: int) -> Path:
    """A copy of a run as a kill after the checkpoint of `step` would have left it: later lines, no later checkpoint."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return copy


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def last_step(run: Path) -> int:
    """The step of the last whole line of the metrics; 0 before there is one."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def curve(run: Path) -> list[str]:
    """What must be the same bit by bit: everything in the metrics but times and memory, as text (NaN is not NaN)."""
    measured = {"step_s", "tokens_per_s", "peak_memory_bytes", "slow_rank", "slow_rank_s", "other_ranks_s"}
    return [json.dumps({key: value for key, value in line.items() if key not in measured}) for line in metrics(run)]


def checkpoint_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def state_digest(run: Path) -> dict[str, bytes]:
    """The bytes of every tensor, weights and optimizer, of the newest checkpoint."""
    import torch

    from weft.checkpoint import read_tensors

    newest = run / "checkpoints" / f"step-{checkpoint_steps(run)[-1]:08d}"
    return {
        key: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in read_tensors(newest)
    }


def environment(cache: Path, **extra: str) -> dict[str, str]:
    """For a command: our token cache, one thread, nothing of an outer launcher."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WEFT_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return {**kept, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **extra}


@contextmanager
def running_weft(
    *arguments: str | Path, cwd: Path, cache: Path, launcher: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`weft ARGUMENTS` as a process; its temporary files lie in cwd/tmp, so that a test finds the ranks' pids."""
    (cwd / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, *launcher, "-m", "weft", *map(str, arguments)]
    places = {"cwd": cwd, "env": environment(cache, TMPDIR=str(cwd / "tmp"))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **places) as process:
        try:
            yield process
        finally:
            if launcher and process.poll() is None:
                process.terminate()  # torchrun ends its ranks by itself, and only if it may
                process.communicate(timeout=PATIENCE_S)
            process.kill()


def weft_command(
    *arguments: str | Path, cwd: Path, cache: Path, patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """`weft ARGUMENTS` to its end."""
    with running_weft(*arguments, cwd=cwd, cache=cache) as process:
        out, err = process.communicate(timeout=patience_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def call_weft(*arguments: str | Path) -> tuple[int, str, str]:
    """`weft ARGUMENTS` inside this process: exit code, stdout, stderr. For verbs that start no ranks."""
    from weft.cli.main import main

    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["weft", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), err.getvalue()
    finally:
        sys.argv = argv
    raise AssertionError("weft did not exit")
