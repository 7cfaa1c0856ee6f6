"""What a run with a pipeline leaves behind: its timeline, beside the simulated one; and clocks of two hosts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny_run import train_here

PLAN = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}
SHORT = {"train.steps": 4, "evaluation.every": 0, "checkpoint.at_end": True, "logging.tensorboard": False}


def trained(rank: int, world: int, cache: str, folder: str, corpus: str) -> bool:
    os.environ["XDG_CACHE_HOME"] = cache
    train_here(Path(folder, "run"), Path(corpus), SHORT, plan=PLAN)
    had_files = Path(folder, "run", "pipeline.json").exists()
    again = {**SHORT, "train.steps": 5, "ledger.measure": False}
    train_here(Path(folder, "run"), Path(corpus), again, plan=PLAN, resume=True)
    return had_files


@pytest.fixture(scope="module")
def run(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    assert run_ranks(trained, 2, str(cache), str(folder), str(corpus), timeout_s=120)[0]
    return folder / "run"


def test_the_timeline_is_that_of_the_schedule(run: Path) -> None:
    from weft.schedule import Action, Kind, Schedule

    written = json.loads((run / "pipeline.json").read_text(encoding="utf-8"))
    schedule = Schedule.parse(written["order"])
    times = {
        action: (start, end)
        for rank, actions in enumerate(schedule.ranks)
        for action, start, end in zip(
            actions, written["measured"]["starts"][rank], written["measured"]["ends"][rank], strict=True
        )
    }
    assert all(start < end for start, end in times.values())
    for (kind, stage, index), (start, _) in times.items():
        before = stage - 1 if kind is Kind.F else stage + 1
        if 0 <= before < schedule.num_stages:  # the clocks of both ranks are one
            assert start > times[Action(kind, before, index)][1]
    assert written["in_flight"] == {"measured": [2, 1], "scheduled": [2, 1]}
    assert (written["ranks"], written["clock"]) == ([0, 1], "one host")


def test_a_resumed_run_tells_of_its_own_steps(run: Path) -> None:
    written = json.loads((run / "pipeline.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in written["steps"]] == [5]
    assert written["is_disturbed"] is True  # the first step of a process
    assert json.loads((run / "ledger.json").read_text(encoding="utf-8"))["pipeline"]["step"] == 5


def test_the_ledger_and_the_page_tell_it(run: Path) -> None:
    ledger = json.loads((run / "ledger.json").read_text(encoding="utf-8"))
    assert 0 < ledger["pipeline"]["bubble_share"]["simulated"] < 1
    hidden, inner, vocabulary = 32, 48, 320  # two blocks: q, o; k, v of half as many heads; the MLP; two norms
    block = 3 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    assert ledger["model"]["parameters"] == 2 * block + 2 * vocabulary * hidden + hidden  # of both ranks
    assert ledger["time"]["terms"]["forward_backward"]["measured"] > 0
    assert "forward" not in ledger["time"]["terms"]  # a pipeline does not tell the two apart
    assert 'class="timeline"' in (run / "report.html").read_text(encoding="utf-8")
    assert json.loads((run / "pipeline_trace.json").read_text(encoding="utf-8"))


def trained_without_draining(rank: int, world: int, cache: str, folder: str, corpus: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    plan = {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}}
    train_here(Path(folder, "run"), Path(corpus), {**SHORT, "train.steps": 9}, plan=plan)


def test_a_pipeline_that_never_drains_shows_several_steps_in_one(corpus: Path, cache: Path, tmp_path: Path) -> None:
    from weft.schedule import Action, Kind, Schedule

    run_ranks(trained_without_draining, 2, str(cache), str(tmp_path), str(corpus), timeout_s=120)
    run = tmp_path / "run"
    written = json.loads((run / "pipeline.json").read_text(encoding="utf-8"))
    schedule = Schedule.parse(written["order"])
    assert [step["step"] for step in written["steps"]] == [5]  # after those that were measured
    assert (schedule.num_steps, written["is_disturbed"]) == (4, False)
    updates = [str(action) for action in schedule.ranks[0] if action.kind is Kind.U]
    assert updates == ["0U3", "0U7", "0U11"]  # that of the fourth step comes with the fifth
    assert schedule.ranks[0][-1] == Action(Kind.B, 0, 14)
    assert written["in_flight"] == {"measured": [2, 1], "scheduled": [2, 1]}
    assert 0 < written["bubble_share"]["simulated"] < written["bubble_share"]["measured"]
    assert 'class="timeline"' in (run / "report.html").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[0]["grad_norm"] == 0 < min(record["grad_norm"] for record in records[1:])


def shifts(rank: int, world: int, are_two_hosts: bool) -> Any:
    """This rank's clock is 1000 s ahead, a rank."""
    import torch
    import torch.distributed as dist

    from weft.train.pipeline import watch as pipeline_watch

    original = time.perf_counter
    time.perf_counter = lambda: original() + 1000 * rank  # type: ignore[method-assign]
    if are_two_hosts:
        pipeline_watch._host = lambda: float(rank)
    links = SimpleNamespace(ranks=(0, 1), place=rank, down=dist.group.WORLD)
    return pipeline_watch._compare_clocks(SimpleNamespace(links=links), torch.device("cpu"))  # type: ignore[arg-type]


def test_clocks_of_two_hosts_are_compared() -> None:
    (first_s, _), (second_s, is_one_clock) = run_ranks(shifts, 2, True)
    assert first_s == 0
    assert second_s == pytest.approx(-1000, abs=1)
    assert not is_one_clock
    assert run_ranks(shifts, 2, False) == [(0.0, True)] * 2  # one host has one clock, whatever a barrier takes
