"""A running job seen from outside: its sockets, the signals it gets, and the death of its launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LAUNCHER_SCRIPT = Path(__file__).with_name("launcher_script.py")
PATIENCE_S = 60
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


@contextmanager
def running_job(mode: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher whose two ranks have passed step 3, and the ranks' pids."""
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCHER_SCRIPT), mode, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        files = [folder / "pid-0", folder / "pid-1"]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        yield launcher, [int(file.read_text()) for file in files]
    finally:
        launcher.kill()
        launcher.communicate()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listening_addresses(pid: int) -> set[str]:
    """The local addresses, as /proc writes them, of every TCP socket this process listens on."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_every_socket_listens_on_loopback_only_and_no_rank_outlives_the_launcher(tmp_path: Path) -> None:
    with running_job("forever", tmp_path) as (launcher, ranks):
        for pid in (launcher.pid, *ranks):
            assert listening_addresses(pid) == {"0100007F"}
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not any(is_alive(pid) for pid in ranks))
    assert not (tmp_path / "saved-0").exists()


def test_sigterm_lets_the_ranks_save_and_ends_with_zero(tmp_path: Path) -> None:
    with running_job("forever", tmp_path) as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, output) == (0, "")
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_the_first_interrupt_ends_a_job_whose_rank_is_stopped(tmp_path: Path) -> None:
    with running_job("forever", tmp_path) as (launcher, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(0.3)
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, output) == (0, "")
    assert (tmp_path / "saved-1").exists()
    assert not any(is_alive(pid) for pid in ranks)


def test_a_second_interrupt_kills_ranks_that_do_not_end(tmp_path: Path) -> None:
    with running_job("stubborn", tmp_path) as (launcher, ranks):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert all(is_alive(pid) for pid in ranks)
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, "second signal" in output) == (3, True)
    assert not any(is_alive(pid) for pid in ranks)
