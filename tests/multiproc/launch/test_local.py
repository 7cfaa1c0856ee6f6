"""Two real ranks under our launcher: what ends a job, and the one error that comes out of it."""

import json
import sys
import time
from pathlib import Path

import pytest

from weft.core.errors import DataError, RankError, StallError
from weft.launch.local import launch

RANK_SCRIPT = Path(__file__).with_name("rank_script.py")


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(mode: str, folder: Path, *, max_restarts: int = 0, lines: list[str] | None = None) -> None:
    command = [sys.executable, str(RANK_SCRIPT), mode, str(folder)]
    log = [].append if lines is None else lines.append
    launch(command, num_ranks=2, scratch=folder / "ranks", max_restarts=max_restarts, log=log)


def generations(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ranks").iterdir())


def test_an_exception_is_the_one_message_and_nothing_else_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError) as caught:
        start("raise", tmp_path)
    assert caught.value.message == "rank 1 failed in step 3: ValueError: boom"
    written = json.loads((tmp_path / "ranks/generation-0/error-1.json").read_text())
    assert (written["rank"], written["phase"], written["exit_code"]) == (1, "step 3", 3)
    assert "in misbehave" in written["traceback"]
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_bad_input_keeps_its_class_and_is_not_restarted(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        start("input", tmp_path, max_restarts=2)
    assert caught.value.message == "rank 1 failed in step 3: no text here"
    assert (caught.value.hint, caught.value.exit_code) == ("give some", 2)
    assert generations(tmp_path) == ["generation-0"]


def test_a_killed_rank_is_the_cause_and_not_its_peers_lost_connection(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL$") as caught:
        start("kill", tmp_path)
    assert "--max-restarts" in caught.value.hint
    # Generous: only to tell "at once" from the collective timeout of minutes.
    assert time.time() - float((tmp_path / "killed-0").read_text()) < 60


def test_neither_a_lingering_thread_nor_a_busy_peer_keeps_a_failed_job_alive(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed in step 3: ValueError: boom$"):
        start("linger", tmp_path)
    failed_at = json.loads((tmp_path / "ranks/generation-0/error-1.json").read_text())["time"]
    assert time.time() - failed_at < 60


def test_a_rank_that_leaves_without_a_word_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 \(pid \d+\) ended with exit code 7 "):
        start("exit", tmp_path)


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        (
            "stop",
            r"rank 1 \(host \S+, pid \d+\) did not arrive in all_reduce 4 \(all ranks\) of step 3 within \d+ s:"
            r" it is stopped \(state T\), last seen (in|after) (join|step \d) \d+ s ago",
        ),
        pytest.param(
            "lock",
            r"rank 1 \(host \S+, pid \d+\) did not arrive in all_reduce 4 \(all ranks\) of step 3 within \d+ s:"
            r" it is waiting \(state S\), last seen (in|after) (join|step \d) \d+ s ago,"
            r" at rank_script.py:\d+ in hold_the_lock",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "shape",
            r"the ranks do not issue the same collectives: number 4 \(all ranks\) is all_reduce of \[\[64\]\] on rank 1"
            r" and all_reduce of \[\[1\]\] on rank 0, in step 3, at rank_script.py:\d+ in misbehave",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "loop",
            r"rank 1 \(host \S+, pid \d+\) did not arrive in all_reduce 4 \(all ranks\) of step 3 within \d+ s:"
            r" it is \w+ \(state \w\), in step 3 for \d+ s, at rank_script.py:\d+ in spin",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "skip",
            r"the ranks do not issue the same collectives: number 4 \(all ranks\) is barrier on rank 1 and"
            r" all_reduce of \[\[1\]\] on rank 0, in step 3, at rank_script.py:\d+ in misbehave",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hang_names_the_rank_that_did_not_arrive_and_the_collective(
    mode: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_HANG_S", "6")
    with pytest.raises(StallError, match=f"^{sentence}$"):
        start(mode, tmp_path)


@pytest.mark.slow
def test_three_kills_three_restarts_and_a_good_end(tmp_path: Path) -> None:
    lines: list[str] = []
    start("kill-3", tmp_path, max_restarts=3, lines=lines)
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]
    assert generations(tmp_path) == [f"generation-{n}" for n in range(4)]
    assert [line.split("; ")[-1] for line in lines] == [f"restarting all ranks ({n} of 3)" for n in (1, 2, 3)]
    assert ["rank 0" in line for line in lines] == [True, False, True]


def test_a_command_that_does_not_exist_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="could not be started"):
        launch([str(tmp_path / "nothing")], num_ranks=1, scratch=tmp_path / "ranks")
