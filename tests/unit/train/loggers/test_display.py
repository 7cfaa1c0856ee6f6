"""What a person sees: a bar on a terminal, plain lines elsewhere, nothing from other ranks, stdout left alone."""

from __future__ import annotations

import os
import pty
import sys
from typing import Any

import pytest

from weft.core.records import DtypeRecord, StepRecord
from weft.train.loggers.display import Display, step_figures


def record(step: int, **fields: Any) -> StepRecord:
    return StepRecord(
        step=step, loss=2.5, grad_norm=0.75, tokens=100, learning_rate=1e-3, step_s=0.5, tokens_per_s=1500.0,
        peak_memory_bytes=3 * 2**20, **fields,
    )  # fmt: skip


LEDGER: dict[str, Any] = {
    "run": {"first_loss": 5.5, "final_loss": 2.5, "eval_loss": 2.75, "tokens_per_s": 1500.0, "status": "finished",
            "steps": 20, "elapsed_s": 75.0},
    "memory": {"peak_bytes": 2**20},
}  # fmt: skip


def show(display: Display) -> None:
    display.start(done=0)
    for step in range(1, 21):
        display.step(record(step))
    display.dtypes(
        [
            DtypeRecord(component="weights", asked="bfloat16", found=("bfloat16",)),
            DtypeRecord(component="gradients", asked="float32", found=("bfloat16", "float32")),
        ]
    )
    display.stop()
    display.summary(LEDGER)


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(Display(is_speaking=True, total_steps=20, every=10))
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/20", "10/20", "20/20"]
    assert "loss 2.5000  norm 0.750  1.50 K tokens/s  3.0 MiB  500ms/step" in lines[0]
    assert any("gradients" in line and "DIFFERS" in line for line in lines)
    assert any("weights" in line and "ok" in line for line in lines)
    assert "finished at step 20: loss 5.500 -> 2.500, held-out 2.750; 1.50 K tokens/s" in captured.err
    assert "\x1b" not in captured.err  # no colour codes in a log file


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(Display(is_speaking=False, total_steps=20, every=10))
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(theirs, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        show(Display(is_speaking=True, total_steps=20, every=10))
        terminal.flush()
        text = _read_all(ours)
    assert "training" in text
    assert "20/20" in text
    assert "loss 2.5000" in text
    assert "step 10/20" not in text  # the bar takes the place of the lines
    assert "\x1b[?25h" in text  # the cursor comes back


def _read_all(descriptor: int) -> str:
    os.set_blocking(descriptor, False)
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except BlockingIOError:
        pass
    os.close(descriptor)
    return b"".join(parts).decode()


def test_figures_of_special_steps() -> None:
    assert "(held-out 1.2500)" in step_figures(record(1, eval_loss=1.25))
    assert "skipped: overflow" in step_figures(record(1, skipped=True))
    assert "skipped" not in step_figures(record(1))


def test_a_mixture_shows_load_and_drops() -> None:
    assert "expert load 1.50x  1" in step_figures(record(1, expert_load=1.5))
    assert "expert load 1.50x, 12.5% dropped  1" in step_figures(record(1, expert_load=1.5, dropped_share=0.125))


def test_layers_that_fall_back_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(is_speaking=True, total_steps=20, every=10)
    row = {"input": [0.02, 0.0, 0.0], "weight": [0.5, 0.0, 0.4]}
    names = tuple(f"layers.{at}.q_proj" for at in range(10))
    display.start(done=0)
    display.step(record(4, float8_fallback=names, float8_layers=dict.fromkeys(names, row)))
    display.stop()
    worst = [{"layer": name, "step": 4, **row} for name in names]
    unquantised = [{"layer": name, "step": 4} for name in names]
    display.float8({"num_layers": 14, "worst": worst, "unquantised": unquantised, "limit": 0.2})
    display.float8(None)
    lines = capsys.readouterr().err.splitlines()
    assert (
        "float8: layers.0.q_proj computes unquantised from step 5 on: error 50.0% of its weight, 40.0% of it"
        in lines[0]
    )
    assert lines[8] == "float8: so do 2 more layers, see metrics.jsonl"
    assert any("worst 5 of 14 layers" in line for line in lines)
    assert "50.00%" in " ".join(lines)
    assert lines[-1] == "float8: 10 layers fell back to unquantised products"
