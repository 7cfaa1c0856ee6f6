"""Processes that encode parts for a builder, which reads the text. A task is text; the result is a file.

They are started as commands and not by `multiprocessing`, which would import the user's script again: a script that
calls `weft.train` without a main guard would train in each of them. They end when their builder closes stdin.
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
from typing import Any

from weft.core.data_spec import DataSpec
from weft.core.errors import RunError, error_from_dict
from weft.data.documents import Document

COMMAND = (sys.executable, "-m", "weft.data.encode_worker")


@dataclass(frozen=True, kw_only=True)
class EncodeTask:
    """One part to encode."""

    path: Path
    documents: list[Document]
    documents_crc32: int

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.documents))


class EncodePool:
    """`num_workers` processes, each with a tokenizer by name, or the encoder of samples of a run's data."""

    def __init__(self, encoder: str | DataSpec, *, num_workers: int, key: str) -> None:
        self._lock = threading.Lock()
        self._workers = [_start(encoder, key) for _ in range(num_workers)]

    def __enter__(self) -> EncodePool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def run(self, tasks: Iterator[EncodeTask], *, done: Callable[[EncodeTask], None]) -> None:
        """Run every task; the first failure ends all. `tasks` and `done` are called by one thread at a time."""
        executor = ThreadPoolExecutor(len(self._workers), thread_name_prefix="encode")
        try:
            futures = [executor.submit(self._feed, worker, tasks, done) for worker in self._workers]
            for future in futures:
                future.result()
        except BaseException:  # also an interrupt: threads that wait for an answer end with their worker
            for worker in self._workers:
                worker.kill()
            raise
        finally:
            executor.shutdown()

    def _feed(
        self, worker: subprocess.Popen[bytes], tasks: Iterator[EncodeTask], done: Callable[[EncodeTask], None]
    ) -> None:
        while (task := self._take(tasks)) is not None:
            _ask(worker, task)
            with self._lock:
                done(task)

    def _take(self, tasks: Iterator[EncodeTask]) -> EncodeTask | None:
        with self._lock:
            return next(tasks, None)


def _start(encoder: str | DataSpec, key: str) -> subprocess.Popen[bytes]:
    # One core each: the threads of the tokenizers would compete.
    one_core = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **one_core, "CUDA_VISIBLE_DEVICES": ""}
    worker = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    _send(worker, (encoder, key))
    return worker


def _ask(worker: subprocess.Popen[bytes], task: EncodeTask) -> None:
    try:
        _send(worker, task)
        answer: dict[str, Any] = pickle.load(worker.stdout)  # type: ignore[arg-type]
    except (EOFError, OSError, pickle.UnpicklingError):
        raise RunError(
            f"a tokenising process ended unexpectedly (exit code {worker.wait()})",
            hint="run again: finished parts are kept; was it killed for lack of memory?",
        ) from None
    if answer:
        raise error_from_dict(answer)


def _send(worker: subprocess.Popen[bytes], value: object) -> None:
    assert worker.stdin is not None  # opened as a pipe
    pickle.dump(value, worker.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    worker.stdin.flush()
