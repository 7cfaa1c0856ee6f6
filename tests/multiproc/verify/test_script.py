"""Training scripts of users against one process: right ones pass, planted mistakes are found with their cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default

from weft.core.errors import BadValueError
from weft.verify.script.session import RunSettings, verify_runs
from weft.verify.script.trace import ScriptRun, read_run
from weft.verify.verdict import Verdict

SCRIPT = Path(__file__).with_name("own_training.py")
RIGHT = {
    "ddp": [],
    "ddp, share of a fixed batch": ["--share"],
    "ddp, bfloat16": ["--autocast"],
    "fully_shard": ["--parallel", "fsdp"],
    "all-reduce by hand": ["--parallel", "manual", "--optimizer", "SGD"],
}
MANUAL = ["--parallel", "manual"]
# mistake -> further arguments, the first wrong check, words of the cause
WRONG = {
    "not divided": (MANUAL, "gradients", "summed over 2 ranks"),
    "divided twice": ([], "gradients", "averaged twice"),
    "no all-reduce": (MANUAL, "ranks agree", "an all-reduce is missing"),
    "no sync": ([], "ranks agree", "an all-reduce is missing"),
    "no sync later": ([], "ranks agree", "not reduced over ranks"),
    "no sampler": ([], "samples", "DistributedSampler"),
    "own order": ([], "samples", "one order"),
    "seed by rank": (MANUAL, "initial weights", "not broadcast"),
    "batch norm": ([], "loss", "batch norm"),
    "mean of means": ([], "loss", "different numbers"),
    "no seed": ([], "repeatable", "torch.manual_seed"),
}


ACCELERATED = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

loader_config = DataLoaderConfiguration(use_seedable_sampler="unseeded-sampler" not in sys.argv, data_seed=0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=loader_config)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
for _ in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""


def record_in_rank(rank: int, num_ranks: int, folder: str, arguments: list[str], settings: dict[str, Any]) -> None:
    from weft.verify.script.hooks import install_hooks
    from weft.verify.script.recorder import ScriptRecorder
    from weft.verify.script.running import run_script

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    recorder = ScriptRecorder(Path(folder), rank=rank, world_size=num_ranks, **settings)
    install_hooks(recorder)
    error = run_script(str(SCRIPT), arguments)
    if error is not None:
        raise error
    recorder.finish()


def verdict_on(arguments: list[str], folder: Path, *, steps: int = 3) -> Verdict:
    def start(settings: RunSettings) -> ScriptRun:
        run = folder / str(len(list(folder.iterdir())))
        run.mkdir()
        fields = {key: value for key, value in vars(settings).items() if key != "num_ranks"}
        run_ranks(record_in_rank, settings.num_ranks, str(run), arguments, fields)
        return read_run(run)

    return verify_runs(start, name=SCRIPT.name, num_ranks=2, steps=steps)


@pytest.mark.parametrize("case", by_default(["ddp"], RIGHT))
def test_a_right_script_passes(case: str, tmp_path: Path) -> None:
    verdict = verdict_on(RIGHT[case], tmp_path)
    assert verdict.ok, verdict.text()
    assert verdict.steps == 3
    assert [check.name for check in verdict.checks][-4:] == ["loss", "gradients", "gradient norm", "weights"]
    assert any("batch of its DataLoader" in change for change in verdict.changes) == ("--share" not in RIGHT[case])


@pytest.mark.parametrize("bug", by_default(["not divided", "no sampler"], WRONG, extended=["no sync later"]))
def test_a_planted_mistake_is_found_with_its_cause(bug: str, tmp_path: Path) -> None:
    arguments, name, cause = WRONG[bug]
    verdict = verdict_on([*arguments, "--bug", bug], tmp_path)
    wrong = verdict.first_wrong
    assert wrong is not None
    assert wrong.finding is not None
    assert (wrong.name, cause in (wrong.finding.cause or "")) == (name, True), verdict.text()
    assert wrong.finding.step in ((2,) if bug == "no sync later" else (None, 1))
    assert f"likely cause: {wrong.finding.cause}" in verdict.text()


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="gradients are slices of flat parameters"):
        verdict_on(["--parallel", "fsdp1"], tmp_path)


def call_verify(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "weft", "verify", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.extended
def test_the_command_answers_as_it_does_for_a_plan() -> None:
    code, out, err = call_verify("--script", str(SCRIPT), "--nproc", "2", "--steps", "2", "--json", "--", "--share")
    assert code == 0, err
    fields = json.loads(out)
    assert (fields["ok"], fields["steps"], fields["first_wrong"]) == (True, 2, None)
    assert fields["worst_gradient"]["rel_diff"] < 1e-5
    code, _, err = call_verify("--script", str(SCRIPT), "--steps", "2", "--", "--bug", "divided twice")
    assert code == 1
    assert "likely cause: gradients are 1/2 of those of one process" in err


@pytest.mark.extended
def test_a_script_that_fails_is_one_sentence_below_its_output(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("print('before')\nimport os\nraise ValueError('boom')\n", encoding="utf-8")
    code, out, err = call_verify("--script", str(script), "--json")
    assert code == 3
    assert json.loads(out)["code"] == "W701"
    assert err.startswith("before\nerror [W701]: rank ")
    assert "failed in the script: ValueError: boom (broken.py, line 3)" in err
    script.write_text("print('no training here')\n", encoding="utf-8")
    code, _, err = call_verify("--script", str(script))
    assert (code, "made no optimizer step on 2 ranks" in err) == (2, True)


@pytest.mark.extended
def test_a_script_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: its script cannot run")
    script = tmp_path / "accelerated.py"
    script.write_text(ACCELERATED, encoding="utf-8")
    code, _, err = call_verify("--script", str(script))
    assert code == 0, err
    code, _, err = call_verify("--script", str(script), "--", "unseeded-sampler")
    assert code == 1
    assert "use_seedable_sampler" in err


def test_bad_requests_are_refused_before_any_rank_starts() -> None:
    from typer.testing import CliRunner

    from weft.cli.main import app

    for arguments, sentence in {
        ("--script", "missing.py"): "there is no script missing.py",
        ("--script", str(SCRIPT), "--nproc", "1"): "compares several ranks with one process",
        ("--script", str(SCRIPT), "--all"): "--all does not apply to --script",
        ("run.toml", "stray"): "unexpected argument 'stray'",
    }.items():
        error = CliRunner().invoke(app, ["verify", *arguments]).exception
        assert isinstance(error, BadValueError)
        assert sentence in error.message
