"""`Indexer`: the indexes of all runs, extended by one thread while the page is open; requests go first.

Indexes are kept in the user's cache, one folder per process at a time; without a cache that can be written, or while
another `weft ui` has it, in a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from weft.report.folder import METRICS
from weft.ui.index import MetricsIndex

POLL_S = 1.0
SAMPLES_S = 4.0  # after the start samples stand for large files: the browser's first drawing has the machine to itself
BREATH_S = 0.002  # between chunks: the interpreter's lock is free for a request


class Indexer:
    """`open` begins to read a run's metrics; `with requests()` makes the thread wait."""

    def __init__(self, cache: Path) -> None:
        self._cache = _own_folder(cache)
        self._indexes: dict[Path, MetricsIndex] = {}
        self._lock = threading.Lock()
        self._num_requests, self._samples_until = 0, 0.0
        self._ended, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    @property
    def folder(self) -> Path:
        """Of the cache."""
        return self._cache.path

    def start(self) -> None:
        self._samples_until = time.monotonic() + SAMPLES_S
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._idle.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._cache.close()

    def open(self, run: Path) -> MetricsIndex:
        """The index of a run's metrics, made at the first call."""
        source = run.resolve() / METRICS
        with self._lock:
            if source not in self._indexes:
                name = hashlib.sha256(str(source).encode()).hexdigest()[:24]
                self._indexes[source] = MetricsIndex(source, self._cache.path / name)
            return self._indexes[source]

    @contextlib.contextmanager
    def requests(self) -> Iterator[None]:
        """The thread reads nothing inside this block."""
        with self._lock:
            self._num_requests += 1
            self._idle.clear()
        try:
            yield
        finally:
            with self._lock:
                self._num_requests -= 1
                if not self._num_requests:
                    self._idle.set()

    def progress(self) -> tuple[int, int]:
        """(bytes read, bytes) of all indexes."""
        with self._lock:
            states = [index.state for index in self._indexes.values()]
        return sum(read for read, _ in states), sum(size for _, size in states)

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self.update_all():
                self._ended.wait(POLL_S)

    def update_all(self) -> bool:
        """Read one chunk of each run; whether there was any."""
        with self._lock:
            indexes = list(self._indexes.values())
        has_read = False
        for index in indexes:
            if time.monotonic() < self._samples_until and not index.is_read:
                continue
            self._idle.wait()
            if self._ended.is_set():
                return False
            with contextlib.suppress(OSError):  # the disk of the cache is full: samples stand for the rest
                has_read |= index.update()
            self._ended.wait(BREATH_S)
        return has_read


class _Folder:
    """A cache folder that this process has alone."""

    def __init__(self, path: Path, *, close: contextlib.ExitStack) -> None:
        self.path, self._stack = path, close

    def close(self) -> None:
        self._stack.close()


def _own_folder(cache: Path) -> _Folder:
    stack = contextlib.ExitStack()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((cache / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _Folder(cache, close=stack)
    except OSError:
        stack.close()
        stack = contextlib.ExitStack()
        return _Folder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-ui-"))), close=stack)
