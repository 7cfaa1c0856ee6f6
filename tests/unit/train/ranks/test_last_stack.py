"""The stack of a process whose Python threads cannot run, and the abort that waits until the ranks were asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft.train.ranks.last_stack import read_stack, stack_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signal handlers of libc")
LOCK = """
import ctypes, sys
from pathlib import Path
from weft.train.ranks.last_stack import LastStack, read_stack
last = LastStack(Path(sys.argv[1]), rank=3)
last.start()
last.postpone(0.3)
def hold_the_lock():
    ctypes.PyDLL(None).sleep(1)
hold_the_lock()
print(read_stack(str(last.path)))
last.postpone(60)
print(read_stack(str(last.path)))
last.stop()
"""
ABORT = """
import ctypes, os, sys, threading, time
from pathlib import Path
from weft.train.ranks.last_stack import LastStack
last = LastStack(Path(sys.argv[1]), rank=3)
last.start()
threading.Thread(target=lambda: [time.sleep(0.2), ctypes.CDLL(None).abort()], daemon=True).start()
def wait():
    while not last.is_aborting():
        time.sleep(0.05)
wait()
print("still here", flush=True)
os._exit(9)
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )


def test_code_that_keeps_the_interpreter_lock_is_named_and_forgotten_when_it_ends(tmp_path: Path) -> None:
    held, after = run(LOCK, tmp_path).stdout.splitlines()
    assert held == "['<string>:9 in hold_the_lock', '<string>:10 in <module>']"
    assert after == "[]"
    assert list(tmp_path.iterdir()) == []


def test_an_abort_in_another_thread_waits_for_the_watch(tmp_path: Path) -> None:
    ended = run(ABORT, tmp_path)
    assert (ended.returncode, ended.stdout) == (9, "still here\n")
    stack = read_stack(str(stack_path(tmp_path, rank=3)))
    assert stack[-2:] == ["<string>:11 in wait", "<string>:12 in <module>"] or "<string>:10 in wait" in stack
    assert read_stack("") == read_stack(str(tmp_path / "nothing")) == []
