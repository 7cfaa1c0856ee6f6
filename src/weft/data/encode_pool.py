"""Processes that encode parts for a builder. The reader stays one process; what travels is text in, a file name out.

They are started as commands and not by `multiprocessing`, which would import the user's script again: one that calls
`weft.train` without a main guard would then train in every one of them. They end with their builder: their input ends.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.core.errors import RunError, error_from_dict
from weft.data.documents import Document

COMMAND = (sys.executable, "-m", "weft.data.encode_worker")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One part to encode."""

    path: Path
    documents: list[Document]
    documents_crc32: int

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.documents))


class EncodePool:
    """`num_workers` processes with the tokenizer `name` each."""

    def __init__(self, name: str, *, num_workers: int, key: str) -> None:
        self._lock = threading.Lock()
        self._workers = [_start(name, key) for _ in range(num_workers)]

    def __enter__(self) -> EncodePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def run(self, tasks: Iterator[Task], *, done: Callable[[Task], None]) -> None:
        """Carry out every task; the first failure ends all. `tasks` and `done` are called by one thread at a time."""
        executor = ThreadPoolExecutor(len(self._workers), thread_name_prefix="encode")
        try:
            futures = [executor.submit(self._feed, worker, tasks, done) for worker in self._workers]
            for future in futures:
                future.result()
        except BaseException:  # an interrupt too: threads that wait for a worker's answer end with the worker
            for worker in self._workers:
                worker.kill()
            raise
        finally:
            executor.shutdown()

    def _feed(self, worker: subprocess.Popen[bytes], tasks: Iterator[Task], done: Callable[[Task], None]) -> None:
        while (task := self._take(tasks)) is not None:
            _ask(worker, task)
            with self._lock:
                done(task)

    def _take(self, tasks: Iterator[Task]) -> Task | None:
        with self._lock:
            return next(tasks, None)


def _start(name: str, key: str) -> subprocess.Popen[bytes]:
    # One core each: the tokenizers' own threads would only get in each other's way.
    one_core = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **one_core, "CUDA_VISIBLE_DEVICES": ""}
    worker = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    _send(worker, (name, key))
    return worker


def _ask(worker: subprocess.Popen[bytes], task: Task) -> None:
    try:
        _send(worker, task)
        answer: dict[str, Any] = pickle.load(worker.stdout)  # type: ignore[arg-type]
    except (EOFError, OSError, pickle.UnpicklingError):
        raise RunError(
            f"a process that tokenises ended by itself (exit code {worker.wait()})",
            hint="run again: finished parts are kept; was it killed for want of memory?",
        ) from None
    if answer:
        raise error_from_dict(answer)


def _send(worker: subprocess.Popen[bytes], value: object) -> None:
    assert worker.stdin is not None  # opened as a pipe
    pickle.dump(value, worker.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    worker.stdin.flush()
