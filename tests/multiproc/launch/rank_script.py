"""A rank for the launch tests: joins, all-reduces in a loop, and misbehaves at step 3 as its arguments say.

Usage: rank_script.py MODE FOLDER. Rank 1 is the one that misbehaves, except under `kill-N`, where in each of the
first N generations one rank is killed, in turn. FOLDER takes the marks left for the test.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from weft.core.errors import DataError
from weft.train.ranks.process import Process, StopFlag, join, leave, phase, report_failures

# Far beyond every test's patience: a test that waits for it fails. Tests of hangs give a short one.
TIMEOUT_S = float(os.environ.get("RANK_TIMEOUT_S", 300.0))
HANG_S = float(os.environ.get("RANK_HANG_S", 120.0))


def misbehave(mode: str, process: Process, folder: Path) -> None:
    generation = process.restart_count
    if mode == "raise":  # a failed rank does not take the interpreter's way out, where waiting threads abort
        atexit.register(print, "the interpreter ended")
    if mode == "raise" and process.rank == 1:
        raise ValueError("boom\nsecond line")
    if mode == "input" and process.rank == 1:
        raise DataError("no text here", hint="give some")
    if mode == "linger":
        threading.Thread(target=time.sleep, args=(TIMEOUT_S,)).start()
        if process.rank == 0:
            time.sleep(TIMEOUT_S)
        raise ValueError("boom")
    if mode == "stop" and process.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "loop" and process.rank == 1:
        spin()
    if mode == "lock" and process.rank == 1:
        hold_the_lock()
    if mode == "shape" and process.rank == 1:
        dist.all_reduce(torch.ones(64))
    if mode == "skip" and process.rank == 1:
        dist.barrier()
    if mode == "exit" and process.rank == 1:
        os._exit(7)
    if mode.startswith("kill-") and process.rank == generation % 2 and generation < int(mode.removeprefix("kill-")):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "kill" and process.rank == 1:
        (folder / "killed-0").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def spin() -> None:
    while True:
        time.sleep(0.01)


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(int(TIMEOUT_S))  # PyDLL, unlike CDLL, keeps the interpreter lock


def train(mode: str, process: Process, folder: Path, stop: StopFlag) -> None:
    num_steps = 10_000 if mode in ("forever", "stubborn") else 8
    for step in range(num_steps):
        with phase(f"step {step}"):
            if step == 3:
                misbehave(mode, process, folder)
                (folder / f"pid-{process.rank}").write_text(str(os.getpid()))
            wants_stop = torch.tensor([float(stop.requested and mode != "stubborn")])
            dist.all_reduce(wants_stop)
            time.sleep(0.02)
        if wants_stop.item() > 0:
            (folder / f"saved-{process.rank}").touch()
            return


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    with report_failures(), StopFlag() as stop:
        process = join(device_type="cpu", timeout_s=TIMEOUT_S, hang_timeout_s=HANG_S)
        train(mode, process, folder, stop)
        (folder / f"done-{process.rank}").write_text(str(process.restart_count))
        leave()


main()
