"""The head's figures: from the ledger where there is one, from the other files where not, None where nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.report.facts import counted
from weft.report.folder import read_folder
from weft.report.training.facts import gather_facts, verdict

Write = Callable[..., Path]


def test_the_verdict_of_a_finished_run(whole_folder: Write) -> None:
    line = verdict(gather_facts(read_folder(whole_folder())))
    size, where, steps, loss, evaluation, rate, peak = line.split(" · ")
    assert (size, where) == ("5.31 M parameters", "ZeRO-3 (FSDP), 2 ranks, AMD EPYC 7763 64-Core Processor")
    assert (steps, loss, evaluation) == ("200 steps", "loss 1.748", "evaluation loss 1.838")
    assert rate.endswith(" K tokens/s")
    assert peak == "peak 300.4 MiB per rank"


def test_without_a_ledger_plan_and_metrics_speak(whole_folder: Write) -> None:
    facts = gather_facts(read_folder(whole_folder(num_steps=4, ledger=None)))
    assert (facts.model, facts.strategy, facts.num_ranks, facts.status) == ("llama", "ZeRO-3 (FSDP)", 2, "unknown")
    assert facts.peak_bytes == 318_000_000
    assert facts.parameters is None
    assert facts.elapsed_s is None
    assert facts.steps_phrase == "4 of 200 steps"


def test_with_metrics_alone_nothing_is_invented(whole_folder: Write) -> None:
    bare: dict[str, Any] = {"ledger": None, "run_text": None, "plan_text": None}
    facts = gather_facts(read_folder(whole_folder(num_steps=1, **bare)))
    assert (facts.strategy, facts.num_ranks, facts.steps_asked, facts.eval_loss) == (None, None, None, None)
    assert verdict(facts).startswith("1 step · loss 5.569 · ")


def test_a_plan_of_another_version_is_no_error(whole_folder: Write) -> None:
    facts = gather_facts(read_folder(whole_folder(num_steps=1, ledger=None, plan_text="[mesh]\nwarp = 3\ntp = 4\n")))
    assert (facts.strategy, facts.num_ranks) == (None, 4)


def test_the_throughput_is_the_median(whole_folder: Write, steps_of: Any) -> None:
    steps = steps_of(3)
    for step, rate in zip(steps, (1.0, 500.0, 400.0), strict=True):
        step["tokens_per_s"] = rate
    assert gather_facts(read_folder(whole_folder(steps=steps))).tokens_per_s == 400.0


def test_counted() -> None:
    assert [counted(count, "step") for count in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
