"""`KeptCurves`: whole curves as they were sent, in memory and beside the index, until their metrics file changes.

    <key>.curve   first line: the state of the metrics file; second line: the curve as JSON

A curve is as good as its state is equal. Zoomed curves are not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

MOST = 2_000  # in memory, about 10 KB each
VERSION = 1


class KeptCurves:
    """Of one process; `folder` is its alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._kept: dict[tuple[Hashable, ...], tuple[str, str]] = {}

    def get(
        self, key: tuple[Hashable, ...], state: tuple[Hashable, ...], make: Callable[[], str], *, saves: bool
    ) -> str:
        """The curve of this key and state, made if it is not kept; `saves`: for later processes, too.

        One at a time: two threads that ask for the same curves would both make all of them."""
        with self._lock:
            now = json.dumps([VERSION, *state])
            kept = self._kept.get(key) or (self._load(key) if saves else None)
            if kept is None or kept[0] != now:
                kept = now, make()
                if saves:
                    self._save(key, kept)
            self._kept[key] = kept
            while len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
            return kept[1]

    def _path(self, key: tuple[Hashable, ...]) -> Path:
        return self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.curve"

    def _load(self, key: tuple[Hashable, ...]) -> tuple[str, str] | None:
        try:
            state, curve = self._path(key).read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError):
            return None
        return state, curve

    def _save(self, key: tuple[Hashable, ...], kept: tuple[str, str]) -> None:
        path = self._path(key)
        draft = path.with_suffix(".draft")
        with contextlib.suppress(OSError):  # the disk of the cache is full
            draft.write_text("\n".join(kept), encoding="utf-8")
            draft.replace(path)
