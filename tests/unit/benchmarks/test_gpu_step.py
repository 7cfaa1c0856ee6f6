"""The driver of the GPU benchmark without a GPU: turns, budget, what is done already, bars, the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_folder import benchmarks_importable

from weft.core.plan import Plan
from weft.core.plan_checks import require_consistent
from weft.core.run_spec import RunSpec

with benchmarks_importable():
    import gpu_step
    import gpu_table
    from gpu_cases import GROUPS, Bar, Case, Group, plan_tables, run_tables

GROUP = Group(
    name="toy", shape="llama-3.2-1b", rows=2, sequence=64,
    cases=(Case(name="theirs", estimate_s=10, peer=("--peer", "eager")), Case(name="ours", estimate_s=20, plan={})),
    bars=(Bar(case="ours", against="theirs", speed=1.1, memory=1.0),),
)  # fmt: skip


class Machine:
    """A clock that the cases move; what ran, in order."""

    def __init__(self, *, durations_s: dict[str, float], failing: tuple[str, ...] = ()) -> None:
        self.now_s = 100.0
        self.ran: list[tuple[str, int]] = []
        self.kept: list[dict[str, Any]] = []
        self._durations_s, self._failing = durations_s, failing

    def run(self, turn: gpu_step.Turn, limit_s: float) -> dict[str, Any]:
        self.ran.append((turn.case.name, turn.round))
        self.now_s += self._durations_s[turn.case.name]
        if turn.case.name in self._failing:
            return {"error": "it broke"}
        return figures(1000.0)

    def walk(self, *, budget_s: float, earlier: list[dict[str, Any]] | None = None, rounds: int = 2) -> list[Any]:
        return gpu_step.walk(
            gpu_step.turns_of([GROUP], rounds=rounds), earlier=earlier or [], budget_s=budget_s, run=self.run,
            clock=lambda: self.now_s, keep=self.kept.append,
        )  # fmt: skip


def figures(tokens_per_s: float, *, gib: float = 10.0, first_step_s: float = 5.0) -> dict[str, Any]:
    return {
        "tokens_per_s": tokens_per_s, "step_s": 128 / tokens_per_s, "steps_s": [128 / tokens_per_s],
        "peak_allocated_bytes": gib * 2**30, "peak_reserved_bytes": (gib + 1) * 2**30, "first_step_s": first_step_s,
        "loss_first": 11.5, "loss_last": 9.0, "versions": {"torch": "2.11.0"},
    }  # fmt: skip


def record(case: str, number: int, tokens_per_s: float, *, group: str = "toy", **more: Any) -> dict[str, Any]:
    return {"group": group, "case": case, "round": number, "elapsed_s": 3.0, **figures(tokens_per_s, **more)}


# --- turns and budget -----------------------------------------------------------------------------------------------


def test_cases_of_a_group_take_turns() -> None:
    machine = Machine(durations_s={"theirs": 5, "ours": 5})
    records = machine.walk(budget_s=1000)
    assert machine.ran == [("theirs", 1), ("ours", 1), ("theirs", 2), ("ours", 2)]
    assert machine.kept == records
    assert [found["elapsed_s"] for found in records] == [5, 5, 5, 5]


def test_a_case_is_not_started_when_its_estimate_does_not_fit() -> None:
    machine = Machine(durations_s={"theirs": 5, "ours": 5})
    machine.walk(budget_s=26, rounds=1)  # after 5 s, 21 s are left for an estimate of 20 s and the margin
    assert machine.ran == [("theirs", 1)]


def test_a_second_turn_goes_by_what_the_first_took() -> None:
    """Estimates of 10 s and 20 s; it took 2 s and 60 s, so the quick one fits again and the slow one does not."""
    machine = Machine(durations_s={"theirs": 2, "ours": 60})
    machine.walk(budget_s=100)
    assert machine.ran == [("theirs", 1), ("ours", 1), ("theirs", 2)]


def test_what_is_done_is_not_run_again_and_counts() -> None:
    machine = Machine(durations_s={"theirs": 5, "ours": 5})
    earlier = [record("theirs", 1, 900.0), record("ours", 1, 990.0), {**record("theirs", 2, 1.0), "error": "broke"}]
    records = machine.walk(budget_s=1000, earlier=[*earlier, record("theirs", 1, 1.0, group="another")])
    assert machine.ran == [("theirs", 2), ("ours", 2)]
    assert [found["tokens_per_s"] for found in records] == [900.0, 990.0, 1000.0, 1000.0]


def test_a_failed_case_is_tried_once() -> None:
    machine = Machine(durations_s={"theirs": 5, "ours": 5}, failing=("ours",))
    records = machine.walk(budget_s=1000)
    assert machine.ran == [("theirs", 1), ("ours", 1), ("theirs", 2)]
    assert records[1]["error"] == "it broke"


def test_no_budget_runs_nothing_and_keeps_the_earlier() -> None:
    machine = Machine(durations_s={})
    assert len(machine.walk(budget_s=0, earlier=[record("ours", 1, 990.0)])) == 1
    assert machine.ran == []


# --- bars and page --------------------------------------------------------------------------------------------------


def two_sided(ours: float, theirs: float, **more: Any) -> list[dict[str, Any]]:
    return [record("ours", 1, ours, **more), record("theirs", 1, theirs)]


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        (two_sided(1100, 1000), gpu_table.HOLDS),
        (two_sided(1099, 1000), gpu_table.FAILS),
        (two_sided(1100, 1000, gib=10.1), gpu_table.FAILS),
        (two_sided(1100, 1000, gib=9.0), gpu_table.HOLDS),
        ([record("ours", 1, 1100)], gpu_table.UNKNOWN),
        ([record("ours", 1, 1100), {**record("theirs", 1, 900), "error": "broke"}], gpu_table.UNKNOWN),
    ],
)
def test_a_bar_is_of_speed_and_of_memory(records: list[dict[str, Any]], verdict: str) -> None:
    assert gpu_table.verdict_of(records, GROUP, GROUP.bars[0]) == verdict


def test_figures_are_medians_over_rounds() -> None:
    records = [record("ours", n, speed) for n, speed in enumerate((1000, 1200, 5000), 1)] + [record("theirs", 1, 1000)]
    assert gpu_table.ratio_of(records, GROUP, GROUP.bars[0], "tokens_per_s") == pytest.approx(1.2)


def test_one_of_two_bars_can_be_enough() -> None:
    bars = (Bar(case="ours", against="theirs", speed=2.0), Bar(case="ours", against="theirs", speed=1.1))
    records = two_sided(1500, 1000)
    assert gpu_table.group_verdict(records, replace(GROUP, bars=bars)) == gpu_table.FAILS
    assert gpu_table.group_verdict(records, replace(GROUP, bars=bars, one_bar_is_enough=True)) == gpu_table.HOLDS


def test_the_page_ends_with_the_bars_and_names_what_did_not_run() -> None:
    told = {
        **record("ours", 1, 1150.0, gib=9.0, first_step_s=40.0), "mfu": 0.581, "kernels": {"copy": 0.01, "gemm": 0.2},
        "fast_path": [{"technique": "float8", "on": False, "why": "small projections"}],
    }  # fmt: skip
    broken = {**record("theirs", 2, 1.0), "error": "out of\nmemory | all of it"}
    records = [told, record("ours", 2, 1150.0, gib=9.0, first_step_s=4.0), record("theirs", 1, 1000.0), broken]
    page = gpu_table.table(records, [GROUP])
    lines = page.strip().splitlines()
    assert lines[-1] == "| toy | ours | theirs | 1.150 | ≥ 1.10 | 0.900 | ≤ 1.00 | holds |"
    assert "| toy | ours | 1,150 | 0.0% | 111.3 | 58.1 | 9.0 | 10.0 | 40.0, 4.0 | 11.500 | 9.000 | 2 |" in lines
    assert "| toy | ours | gemm 200.0, copy 10.0 |" in lines
    assert "| toy | ours | float8 | off | small projections |" in lines
    assert "| toy | theirs | 2 | out of memory / all of it |" in lines


# --- the cases ------------------------------------------------------------------------------------------------------


def test_every_bar_names_cases_of_its_group() -> None:
    for group in GROUPS:
        names = {case.name for case in group.cases}
        assert len(names) == len(group.cases)
        assert group.bars
        for bar in group.bars:
            assert {bar.case, bar.against} <= names


@pytest.mark.parametrize("tiny", [False, True])
def test_runs_and_plans_of_the_cases_are_weft_s(tiny: bool) -> None:
    checked = 0
    for group in GROUPS:
        for case in (case for case in group.cases if case.plan is not None):
            run = RunSpec.from_tables(run_tables(group, case, tiny=tiny))
            tables = plan_tables(case, tiny=tiny)
            tables = {**tables, "precision": {"preset": tables["precision"]["preset"]}}  # float8 is not here yet
            plan = Plan.from_tables(tables)
            require_consistent(plan)
            assert run.train.global_batch == plan.num_ranks * (2 if tiny else group.rows)
            assert run.model.config["vocab_size"] == (512 if tiny else run.model.config["vocab_size"])
            checked += 1
    assert checked >= len(GROUPS)


def test_commands_name_files_that_exist(tmp_path: Path) -> None:
    runner = gpu_step.Runner(tmp_path, tiny=False)
    for turn in gpu_step.turns_of(GROUPS, rounds=1):
        command = runner.command(turn)
        assert command[0] == sys.executable
        assert all(Path(part).is_file() for part in command if part.startswith(str(tmp_path)))
        assert "--json" in command
        assert ("--no-against" in command) == (turn.case.plan is not None)  # the peers are processes of their own


def test_a_plan_can_be_changed_from_the_command_line() -> None:
    changed = gpu_step.overridden(
        GROUPS, ["1b-fake8/weft:compile.enabled=false", "1b-fake8/weft:activations.policy=full"]
    )
    plan = changed[0].case("weft").plan
    assert plan["compile"] == {"enabled": False}
    assert plan["activations"] == {"policy": "full"}
    assert GROUPS[0].case("weft").plan["compile"] == {"enabled": True}
    with pytest.raises(ValueError, match="no case of weft"):
        gpu_step.overridden(GROUPS, ["1b-fake8/torchtitan:compile.enabled=false"])
    with pytest.raises(ValueError, match="not of the form"):
        gpu_step.overridden(GROUPS, ["compile=false"])


@pytest.mark.parametrize(
    ("out", "code", "wanted"),
    [
        ('{"tokens_per_s": 1}\n', 0, {"tokens_per_s": 1}),
        ('hello\n{"tokens_per_s": 1}\n', 0, {"tokens_per_s": 1}),
        ('{\n "tokens_per_s": 1\n}\n', 0, {"tokens_per_s": 1}),
        ('{"peer": "eager", "error": "out of memory"}', 1, {"error": "out of memory"}),
        ('{"error": "PlanError", "code": "W201", "message": "it is so"}', 2, {"error": "PlanError: W201: it is so"}),
        ('{"tokens_per_s": 1}\n', 3, {"error": "exit code 3"}),
        ("3\n", 0, {"error": "exit code 0: the reason"}),
        ("", 1, {"error": "exit code 1: the reason"}),
    ],
)
def test_the_answer_is_the_json_that_was_printed(out: str, code: int, wanted: dict[str, Any]) -> None:
    found = gpu_step.answer_of(out, "a trace\nthe reason\n\n", code)
    found.pop("stderr_tail", None)
    assert found == wanted


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", *arguments])
        monkeypatch.chdir(tmp_path)
        return gpu_step.main()

    return call


def test_the_page_alone_needs_no_gpu(called: Callable[..., int], tmp_path: Path) -> None:
    records = [record("weft", 1, 70_000, group="1b-fake8"), record("torchtitan", 1, 60_000, group="1b-fake8")]
    (tmp_path / "earlier.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert called("--budget-s", "0", "--only", "1b-fake8", "--done", "earlier.jsonl", "--out", "page.md") == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith("# Steps on one GPU")
    assert "| 1b-fake8 | weft | torchtitan | 1.167 | ≥ 1.10 | 1.000 | ≤ 1.00 | holds |" in page
    assert "torch 2.11.0" in page


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_step.Runner(tmp_path, tiny=True)
    monkeypatch.setattr(runner, "command", lambda turn: [sys.executable, "-c", "import time; time.sleep(60)"])
    turn = gpu_step.Turn(group=GROUP, case=GROUP.cases[0], round=1)
    assert runner.run(turn, 0.5)["error"] == "no result in 0 s"


def test_names_that_do_not_exist_are_a_sentence(called: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in ((["--only", "70b"], "--list names them"), (["--done", "no.jsonl"], "no file no.jsonl")):
        with pytest.raises(SystemExit):
            called(*arguments)
        assert said in capsys.readouterr().err
