"""The lock of a run folder: one owner, found dead or alive by pid, start time, machine and heartbeat."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weft.core import lock_file
from weft.core.errors import FolderBusyError, RunFolderError
from weft.core.lock_file import STALE_S, Owner, read_owner
from weft.core.processes import start_of
from weft.train.folder.lock import LOCK_NAME, FolderLock


def write_owner(folder: Path, *, age_s: float = 0.0, **changes: object) -> Owner:
    """A lock as another process would have left it."""
    owner = dataclasses.replace(Owner(), token="another", **changes)  # type: ignore[arg-type]
    folder.mkdir(exist_ok=True)
    path = folder / LOCK_NAME
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    moment = path.stat().st_mtime - age_s
    os.utime(path, (moment, moment))
    return owner


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_second_owner_is_refused_with_pid_and_host(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FolderLock(folder) as lock:
        assert lock.acquire() == ""
        owner = read_owner(folder / LOCK_NAME)
        assert owner is not None
        with pytest.raises(FolderBusyError) as caught:
            FolderLock(folder).acquire()
        assert f"pid {os.getpid()} on {owner.host}" in caught.value.message
        assert f"remove {folder / LOCK_NAME}" in caught.value.hint
        assert (caught.value.code, caught.value.exit_code) == ("W502", 2)
        (folder / "run.toml").write_text("")
    assert [path.name for path in folder.iterdir()] == ["run.toml"]
    FolderLock(folder).acquire()


def test_a_folder_that_nothing_was_written_into_goes_with_the_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run") as lock:
        lock.acquire()
    assert not (tmp_path / "run").exists()
    (tmp_path / "empty").mkdir()
    with FolderLock(tmp_path / "empty") as lock:
        lock.acquire()
    assert (tmp_path / "empty").exists()  # it was there before


def test_owners_that_are_gone_are_followed_with_a_note(tmp_path: Path) -> None:
    write_owner(tmp_path, pid=dead_pid())
    with FolderLock(tmp_path) as lock:
        assert "that process is gone" in lock.acquire()
        assert read_owner(tmp_path / LOCK_NAME) != Owner()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_came_back_as_another_process_is_no_owner(tmp_path: Path) -> None:
    here = Owner()
    assert here.started
    write_owner(tmp_path, started=here.started - 1)
    with FolderLock(tmp_path) as lock:
        assert "that process is gone" in lock.acquire()


def test_a_process_that_ended_and_was_not_waited_for_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        write_owner(tmp_path, pid=process.pid, started=started)
        with pytest.raises(FolderBusyError, match=f"pid {process.pid} "):
            FolderLock(tmp_path).acquire()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
        with FolderLock(tmp_path) as lock:
            assert "that process is gone" in lock.acquire()


@pytest.mark.parametrize(("age_s", "is_stale"), [(0.0, False), (STALE_S - 5, False), (STALE_S + 5, True)])
def test_an_owner_elsewhere_is_believed_as_long_as_its_heart_beats(
    age_s: float, is_stale: bool, tmp_path: Path
) -> None:
    write_owner(tmp_path, host="far", machine="another kernel", pid=dead_pid(), age_s=age_s)
    with FolderLock(tmp_path) as lock:
        if is_stale:
            assert "no heartbeat" in lock.acquire()
        else:
            with pytest.raises(FolderBusyError, match="on far"):
                lock.acquire()
    assert (tmp_path / LOCK_NAME).exists() is not is_stale  # a refusal leaves the owner's lock alone


def test_a_lock_that_cannot_be_read_is_somebodys_until_it_is_old(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("")
    with pytest.raises(FolderBusyError, match="another process"):
        FolderLock(tmp_path).acquire()
    os.utime(tmp_path / LOCK_NAME, (0, 0))
    with FolderLock(tmp_path) as lock:
        assert "no heartbeat" in lock.acquire()


@pytest.mark.parametrize(("job", "restart", "is_followed"), [("7", "1", True), ("7", "0", False), ("8", "1", False)])
def test_a_restart_of_the_same_job_on_another_host_follows_itself(
    job: str, restart: str, is_followed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(tmp_path, host="far", machine="another kernel", job="torchrun 7", restart=0)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": restart}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with FolderLock(tmp_path) as lock:
        if is_followed:
            assert "earlier start of this job" in lock.acquire()
        else:
            with pytest.raises(FolderBusyError):
                lock.acquire()


@pytest.mark.parametrize(("job", "attempt", "is_followed"), [("a", "1", True), ("a", "0", False), ("b", "1", False)])
def test_a_later_start_by_the_cluster_follows_itself_whatever_restarts_it_had(
    job: str, attempt: str, is_followed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(tmp_path, host="far", machine="another kernel", job="a", restart=3)
    monkeypatch.setenv("WEFT_JOB", job)
    monkeypatch.setenv("WEFT_ATTEMPT", attempt)
    with FolderLock(tmp_path) as lock:
        if is_followed:
            assert "earlier start of this job" in lock.acquire()
        else:
            with pytest.raises(FolderBusyError):
                lock.acquire()


def test_of_many_at_once_one_takes_over(tmp_path: Path) -> None:
    write_owner(tmp_path, pid=dead_pid())
    locks, won, gate = [FolderLock(tmp_path) for _ in range(8)], [], threading.Barrier(8)

    def take(lock: FolderLock) -> None:
        gate.wait()
        with contextlib.suppress(FolderBusyError):
            won.append(lock.acquire())

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    for lock in locks:
        lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_heart_beats_while_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "HEARTBEAT_S", 0.01)
    beaten = threading.Event()
    monkeypatch.setattr(lock_file.os, "utime", lambda path: beaten.set())
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        assert beaten.wait(60)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        FolderLock(tmp_path / "file" / "run").acquire()
