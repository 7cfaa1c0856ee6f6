"""Ranks forked from a process that has done their imports: what they get, how their ends are seen, and exceptions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import RankError
from weft.launch import rank_processes
from weft.launch.local import launch
from weft.launch.rank_processes import has_gpu

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")


@pytest.fixture(autouse=True)
def modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(rank_processes, "has_gpu", lambda: False)


def start(mode: str, folder: Path, *, max_restarts: int = 1, imports: tuple[str, ...] = ("decimal",)) -> list[str]:
    lines: list[str] = []
    command = [sys.executable, "-m", "warm_script", mode, str(folder)]
    launch(
        command,
        num_ranks=2,
        scratch=folder / "ranks",
        max_restarts=max_restarts,
        log=lines.append,
        imports=imports,
    )
    return lines


def facts(folder: Path, generation: int, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"facts-{generation}-{rank}").read_text())


def test_every_generation_is_forked_and_a_killed_rank_does_not_wait_for_its_peers(tmp_path: Path) -> None:
    began = time.monotonic()
    lines = start("kill", tmp_path)
    assert time.monotonic() - began < 60  # its peer sleeps for 300 s
    assert [line.split(" (pid")[0] for line in lines] == ["rank 1"]
    assert "was killed by SIGKILL; restarting all ranks (1 of 1)" in lines[0]
    found = [facts(tmp_path, generation, rank) for generation in (0, 1) for rank in (0, 1)]
    assert [(one["is_warm"], one["is_leader"], one["world"]) for one in found] == [(True, True, "2")] * 4
    assert len({one["parent"] for one in found}) == 1
    assert os.getpid() not in {one["parent"] for one in found}
    assert found[3]["argv"] == ["kill", str(tmp_path)]
    assert found[3]["scratch"] == str(tmp_path / "ranks/generation-1")


@pytest.mark.parametrize("driver", ["nvidiactl", "kfd"])
def test_a_machine_with_gpus_forks_no_ranks(driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    assert not has_gpu(devices)
    (devices / driver).touch()
    assert has_gpu(devices)
    monkeypatch.setattr(rank_processes, "has_gpu", lambda: True)
    start("kill", tmp_path)
    assert not facts(tmp_path, 0, 0)["is_warm"]


def test_the_exit_code_of_a_forked_rank_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 \(pid \d+\) ended with exit code 7 "):
        start("exit", tmp_path, max_restarts=0)


def test_without_the_process_that_forks_ranks_start_by_their_command(tmp_path: Path) -> None:
    lines = start("parent", tmp_path)
    assert "restarting all ranks (1 of 1)" in lines[0]
    assert lines[1:] == ["note: each restart imports all libraries again: the process that forks ranks has ended"]
    assert [facts(tmp_path, generation, 0)["is_warm"] for generation in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
            "the imports started 1 threads",
        ),
        ("raise ValueError('boom')", "unfit_module could not be imported: boom"),
    ],
)
def test_imports_that_forbid_a_fork_are_named(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfit_module.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{tmp_path}")
    lines = start("none", tmp_path, imports=("unfit_module",))
    assert lines == [f"note: each restart imports all libraries again: {reason}"]
    assert not facts(tmp_path, 0, 0)["is_warm"]


def test_no_forked_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from weft.launch.local import launch;"
        "command = [sys.executable, '-m', 'warm_script', 'forever', sys.argv[1]];"
        "launch(command, num_ranks=2, scratch=Path(sys.argv[1]) / 'ranks', imports=['decimal'])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        files = [tmp_path / f"facts-0-{rank}" for rank in (0, 1)]
        wait_for(lambda: all(file.exists() for file in files))
        found = [facts(tmp_path, 0, rank) for rank in (0, 1)]
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_for(lambda: not any(is_alive(pid) for one in found for pid in (one["pid"], one["parent"])))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
